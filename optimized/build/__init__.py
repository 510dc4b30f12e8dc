"""Kernel variants, their compilation, and the cache of compiled libraries."""
