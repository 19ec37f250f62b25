"""Quotients by a table: what the blocks of a cluster finish is the same as by dividing."""

import re

from agentcompile_cuda_kit.device_library import include_dir
from hypothesis import given
from hypothesis import strategies as st

BITS = 16


def reciprocals() -> list[int]:
    """The table of split.cuh, as it stands there."""
    text = (include_dir() / "agentcompile" / "split.cuh").read_text(encoding="utf-8")
    found = re.search(r"reciprocals\[(\d+)\] = \{([^}]*)\}", text)
    assert found is not None
    numbers = [int(number) for number in found[2].split(",")]
    assert len(numbers) == int(found[1])
    return numbers


TABLE = reciprocals()


@given(divisor=st.integers(1, len(TABLE) - 1), data=st.data())
def test_a_product_with_a_reciprocal_is_the_quotient(divisor: int, data: st.DataObject) -> None:
    """Of every number that the kernel's assertion lets through."""
    number = data.draw(st.integers(0, (1 << BITS) // divisor - 1))
    assert number * TABLE[divisor] >> BITS == number // divisor
    assert number * TABLE[divisor] < 1 << 32, "in 32 bits"
