"""What ``kernels.py`` is made of: the cases, how one is compiled, the contenders, the clock, and the results."""
