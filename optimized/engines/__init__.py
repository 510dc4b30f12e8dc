"""Candidates and kernels of other engines, loaded from their own packages."""
