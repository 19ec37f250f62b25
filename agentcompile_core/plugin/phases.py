"""Phases of a block of a traced kernel, in the order in which it passes them; what its backend notes them by."""

PHASES = ("start", "released", "first", "last", "merged", "end")
"""``start``: the block runs. ``released``: its wait for the kernels before it has ended, in the first of its warps. ``first``, ``last``: a
stage of what it streams into shared memory has landed, as its first warp sees it. ``merged``: the parts of other blocks are there.
``end``: its last thread returns."""
