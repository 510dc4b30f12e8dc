"""Drawn inputs for the kernels of this project, fed as a server would feed them."""
