"""Judge the key side, the query side and the attention of one layer."""
