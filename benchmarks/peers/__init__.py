"""Systems beside ours: each in a process of its own, asked for generations in turns, on one GPU."""
