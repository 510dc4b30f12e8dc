"""The candidates of this package by name, and any other by entry point or file."""
