"""What the blocks of a cluster finish: quotients by a reciprocal that errs are those of a division, and all that is sent has a place."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

BLOCKS, CHUNKS = 16, 1 << 12  # what MessageParts::first_owned of split.cuh lets through
CHUNK = 16  # outputs that have one owner
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


def place(output: int, first: int, sender: int, active: int) -> int:
    """``MessageParts::place``."""
    return ((output - first) // CHUNK * active + sender) * CHUNK + output % CHUNK


@given(blocks=st.integers(1, BLOCKS), width=st.integers(1, 200).map(lambda half: 2 * half), data=st.data())
def test_what_blocks_send_to_each_owner_has_places_of_its_own_and_room(blocks: int, width: int, data: st.DataObject) -> None:
    active, chunks = data.draw(st.integers(1, blocks), label="active"), -(-width // CHUNK)
    room = (chunks + blocks - 1) * CHUNK
    held: dict[int, set[int]] = {}
    for output in range(width):
        owner = output // CHUNK * active // chunks
        first = -(-owner * chunks // active) * CHUNK
        assert first <= output and place(output, first, 0, active) % 2 == output % 2, "pairs lie at multiples of 8 bytes"
        for sender in range(active):
            where = place(output, first, sender, active)
            assert 0 <= where < room and where not in held.setdefault(owner, set())
            held[owner].add(where)
