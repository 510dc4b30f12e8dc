"""Recordings: the format, writing, and reading as untrusted input."""
