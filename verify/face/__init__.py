"""Needlepoint: does an optimized DeepSeek-V4 attention path still select what the reference does."""
