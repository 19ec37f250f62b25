"""Phases of a block of a traced kernel, in the order in which it passes them; what its backend notes them by."""

PHASES = ("start", "released", "first", "last", "merged", "end")
"""``start``: the block runs. ``released``: its wait for the kernels before it has ended, in its last warp. ``first``, ``last``: a stage
of what it streams into shared memory has landed. ``merged``: the parts of other blocks are there. ``end``: its last thread returns."""
