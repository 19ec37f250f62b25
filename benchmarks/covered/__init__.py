"""What `make coverage` compiles: tiny random models of transformers' own types, and plain modules."""
