"""Two recordings against each other; adapters for dumps and captures of engines."""
