"""Histories of a server: events, rules, expected contents, sweeps."""
