"""What benchmarks/kernelbench.py is made of: finding task files, judging one in a process of its own, scores and pictures."""
