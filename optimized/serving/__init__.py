"""Servers that work step by step, through a cache that stays."""
