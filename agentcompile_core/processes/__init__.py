"""Guarded child processes: compilers, servers and workers with deadlines, limits and a small environment."""
