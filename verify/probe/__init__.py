"""Recall of a live endpoint."""
