"""Which lengths of rows are constants of a kernel and which are told to it at launch: one rule for all families."""

MULTIPLE = 64  # of elements: whole 16-byte vectors of every type, for 8 lanes or more
SHORTEST = 128


def known_length(columns: int) -> int:
    """``columns`` where kernels are to have it as a constant, 0 where they are told at launch.

    A constant folds the arithmetic of places and unrolls the loops over a row: sums of one row of 2048 halves took 1.37 us with it and
    1.53 without, those of 128 rows 1.80 and 1.95 (H200). It also makes a kernel of its own for every length, so only those are constants
    of which a model has few: multiples of 64 from 128 on. All others share the kernel that is told. Norms ask nobody: what holds a row in
    registers is built for its length, heads of 64 and 96 included.
    """
    return columns if columns >= SHORTEST and columns % MULTIPLE == 0 else 0
