"""Plant faults and report which gate catches which."""
