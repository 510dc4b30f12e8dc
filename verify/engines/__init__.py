"""Kernels of SGLang and DeepGEMM as candidates."""
