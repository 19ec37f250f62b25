"""What runs: programs and their memory, weights, sessions, generation, the reading of bundles."""
