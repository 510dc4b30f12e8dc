"""Records of everything that is written or read back."""
