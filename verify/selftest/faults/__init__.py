"""The catalogue of planted faults."""
