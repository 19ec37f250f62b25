"""Text that the compiler writes: pointwise functors and rendered templates."""
