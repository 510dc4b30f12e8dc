"""A whole run: candidates over the layers of an input, ranks, and the result."""
