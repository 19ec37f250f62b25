"""What every language's code generation shares: printing expressions in a dialect, and names that carry a digest."""
