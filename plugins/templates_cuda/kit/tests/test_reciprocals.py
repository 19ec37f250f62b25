"""Quotients by a reciprocal that errs: what the blocks of a cluster finish is the same as by dividing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

BLOCKS, CHUNKS = 16, 1 << 12  # what MessageParts::first_owned of split.cuh lets through
ERRS = 2.0**-22  # of a reciprocal, twice what rcp.approx may err by


def rounded_up(block: int, chunks: int, active: int, error: float) -> int:
    """``MessageParts::first_owned`` in chunks, in fp32, with a reciprocal that is off by ``error`` of it."""
    reciprocal = np.float32(np.float64(1) / active * (1 + error))
    return int((np.float32(block * chunks + active) - np.float32(0.5)) * reciprocal)


@given(active=st.integers(1, BLOCKS), chunks=st.integers(1, CHUNKS - 1), error=st.floats(-ERRS, ERRS), data=st.data())
def test_half_a_chunk_is_more_than_a_reciprocal_errs_by(active: int, chunks: int, error: float, data: st.DataObject) -> None:
    block = data.draw(st.integers(0, active), label="block")
    assert rounded_up(block, chunks, active, error) == -(-block * chunks // active)


def test_blocks_behind_the_last_one_with_work_begin_behind_the_end() -> None:
    for active in range(1, BLOCKS + 1):
        for block in range(active, BLOCKS + 1):
            assert rounded_up(block, 37, active, ERRS) >= 37 and rounded_up(block, 37, active, -ERRS) >= 37
