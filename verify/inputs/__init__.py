"""What a run judges over: recordings, synthetic kinds, checkpoints."""
