"""What operators mean: schemas, what shares memory, what depends on what, the interpreter, the reference with its error bounds."""
