"""What a candidate is given and what it may hand back, every optional part included."""
