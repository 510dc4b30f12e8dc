"""The optimized side: fused kernels, their byte-exact emulation and the candidate protocol."""
