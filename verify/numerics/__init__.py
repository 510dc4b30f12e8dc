"""Error bounds, comparisons of rows and codes, and selection judged by meaning."""
