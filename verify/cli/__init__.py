"""Options, commands and the pytest plugin."""
