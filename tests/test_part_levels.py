"""Parts of layers that something outside interrupts: who reads nothing of its layer joins a part that there is, and tears none apart."""

from types import MappingProxyType

from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.dependency import Dependencies, bits
from agentcompile_core.stages.analyze import boundaries


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Dependencies, list[str]]:
    count = draw(st.integers(1, 14))
    keys = [draw(st.sampled_from("abc")) for _ in range(count)]
    before = [draw(st.integers(0, (1 << at) - 1)) & draw(st.integers(0, (1 << at) - 1)) for at in range(count)]
    names = tuple(map(str, range(count)))
    index = MappingProxyType({name: at for at, name in enumerate(names)})
    return Dependencies(names=names, index=index, before=tuple(before), ancestors=(0,) * count, descendants=(0,) * count), keys


def levels_before(deps: Dependencies, keys: list[str]) -> list[int]:
    """As early as everything can be."""
    levels = [0] * len(keys)
    for at, mask in enumerate(deps.before):
        levels[at] = max((levels[p] + (keys[p] != keys[at]) for p in bits(mask)), default=0)
    return levels


@settings(deadline=None, max_examples=300)
@given(graphs())
def test_there_are_no_more_parts_and_their_order_holds(graph: tuple[Dependencies, list[str]]) -> None:
    deps, keys = graph
    found, early = boundaries._levels(deps, keys), levels_before(deps, keys)
    assert all(found[p] + (keys[p] != keys[at]) <= found[at] for at, mask in enumerate(deps.before) for p in bits(mask))
    assert set(zip(keys, found, strict=True)) <= set(zip(keys, early, strict=True))


def test_what_reads_nothing_of_its_layer_waits_for_who_reads_it() -> None:
    """a reads nothing; b, of another key, reads c of a's key; d, of a's key again, reads both: a joins d."""
    keys, before = ["layer", "layer", "layer", "boundary", "layer"], (0, 0, 0b10, 0b100, 0b1001)
    names = tuple(map(str, range(5)))
    index = MappingProxyType({name: at for at, name in enumerate(names)})
    deps = Dependencies(names=names, index=index, before=before, ancestors=(0,) * 5, descendants=(0,) * 5)
    assert levels_before(deps, keys) == [0, 0, 0, 1, 2]
    assert boundaries._levels(deps, keys) == [2, 0, 0, 1, 2]
