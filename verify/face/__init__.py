"""Needlepoint: does an optimized DeepSeek-V4 attention path select what its reference selects."""
