"""The reference: what DeepSeek-V4's compressor and indexer mean to compute, in plain PyTorch."""
