"""Which steps may be one launch: those of one source that write nothing another of them touches."""

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType, TensorSpec
from agentcompile_core.ir.region import Access, Match, Operand, Role, SemanticLabel
from agentcompile_core.runtime.program import Segment
from agentcompile_core.runtime.row_runs import alike, runs_beside

BYTES = 64


def operand(name: str, access: Access) -> Operand:
    return Operand(name=name, role=Role.STATE, access=access, values=(name,), spec=TensorSpec(shape=(BYTES,), dtype=DType.U8))


MATCH = Match(kind="k", label=SemanticLabel.ATTENTION, nodes=("n",), operands=(
    operand("read", Access.READ), operand("cache", Access.READ_WRITE), operand("out", Access.WRITE)))
SEGMENT = Segment(nodes=("n",), match=MATCH, source="s")
PLACES = st.fixed_dictionaries({name: st.integers(0, 12).map(lambda n: 40 * n) for name in ("read", "cache", "out")})


def bytes_of(addresses: dict[str, int], *names: str) -> set[int]:
    return {byte for name in names for byte in range(addresses[name], addresses[name] + BYTES)}


@given(st.lists(PLACES, min_size=1, max_size=5))
def test_runs_beside_each_other_touch_nothing_that_another_writes(addresses: list[dict[str, int]]) -> None:
    count = runs_beside([SEGMENT] * len(addresses), addresses)

    def meet(one: dict[str, int], other: dict[str, int]) -> bool:
        return bool(bytes_of(one, "cache", "out") & bytes_of(other, "read", "cache", "out"))

    found = [any(meet(a, addresses[last]) or meet(addresses[last], a) for a in addresses[:last]) for last in range(1, len(addresses))]
    assert count == (found.index(True) + 1 if True in found else len(addresses))


def test_what_is_only_read_may_be_shared() -> None:
    rows = [{"read": 0, "cache": 1000 * row, "out": 500 + 1000 * row} for row in range(1, 5)]
    assert runs_beside([SEGMENT] * 4, rows) == 4
    assert runs_beside([SEGMENT], rows[:1]) == 1
    assert runs_beside([SEGMENT] * 4, [{**row, "read": 500 + 2000} for row in rows]) == 1  # what the second one writes
    assert runs_beside([SEGMENT] * 4, [{name: place for name, place in row.items() if name != "cache"} for row in rows]) == 4


def test_segments_of_other_sources_end_a_run() -> None:
    other, framework = evolve(SEGMENT, source="t"), Segment(nodes=("m",))
    segments = (framework, SEGMENT, SEGMENT, other, SEGMENT)
    assert [len(alike(segments, first)) for first in (1, 2, 3, 4)] == [2, 1, 1, 1]
