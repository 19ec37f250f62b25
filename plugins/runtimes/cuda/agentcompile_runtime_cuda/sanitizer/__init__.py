"""NVIDIA's compute-sanitizer on single kernels: what it says, how it is run, and the validator that asks it."""
