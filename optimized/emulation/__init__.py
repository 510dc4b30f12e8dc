"""The specification in PyTorch, bit for bit, and the candidates made of it."""
