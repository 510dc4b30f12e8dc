"""The CUDA kernels: plans, launches, checks, and the candidates made of them."""
