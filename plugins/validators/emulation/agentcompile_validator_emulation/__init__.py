"""Runs CUDA kernels on the CPU: a backend without a GPU, and a validator that finds races, bounds and barrier errors."""
