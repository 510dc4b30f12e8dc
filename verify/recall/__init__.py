"""Recall impact over depth and length."""
