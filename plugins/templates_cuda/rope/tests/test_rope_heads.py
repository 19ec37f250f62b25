"""Whole heads of rotated and other channels: the kernel against the graph it replaces, and its limits."""

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import rope_heads_case
from agentcompile_templates_cuda_rope import RopeFamily
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Graph, Match, Schedule, StepSource, compare, oracle

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import EmulationError
from agentcompile_validator_emulation.testing import TORCH, Emulated

H200, FAMILY = preset("h200"), RopeFamily()
FEW = settings(max_examples=6, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def lowered(match: Match) -> StepSource:
    return FAMILY.lower(match, Schedule({"threads": 64}), H200)


def budget_use(source: StepSource, match: Match, graph: Graph, seed: int = 0) -> float:
    generator = torch.Generator().manual_seed(seed)
    tensors = {o.name: torch.randn(o.spec.shape, generator=generator).to(TORCH[o.spec.dtype]) for o in match.operands}
    tensors["out"].fill_(float("nan"))
    values = {o.values[0]: tensors[o.name] for o in match.operands if o.name != "out"}
    Emulated(source, match, H200).run(tensors)
    (wanted,) = oracle(graph, values).values()
    return compare(tensors["out"], wanted).budget_use


@FEW
@given(heads=st.integers(1, 5), seed=st.integers(0, 99), half=st.integers(1, 9), rest=st.integers(1, 12),
       layout=st.sampled_from(("interleaved", "half", "apart")),
       shared=st.booleans(), types=st.sampled_from(((DType.F16, None), (DType.BF16, DType.F32), (DType.F32, None))))
def test_heads_are_put_together(heads: int, half: int, rest: int, layout: str, shared: bool, types: tuple[DType, DType | None],
                                seed: int) -> None:
    match, graph = rope_heads_case(heads=heads, rotary=2 * half, rest=rest, layout=layout, shared=shared, dtype=types[0], table=types[1])
    assert FAMILY.accepts(match, H200) is True
    assert budget_use(lowered(match), match, graph, seed) <= 1.0


WRONG = {  # what is wrong: text, with what it is replaced
    "pairs lie beside each other": ("2 * element : 2 * (element - half) + 1", "element : element"),
    "all heads are the first": ("head * x_step", "0 * x_step"),
    "the rest of all heads is that of the first": ("head * rest_step", "0 * rest_step"),
    "the rotated part comes first": ("i % head_dim - first", "i % head_dim"),
    "the dependency is not waited for": ("  ac::grid_dependency_wait();\n", ""),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    match, graph = rope_heads_case(heads=3, rotary=8, rest=6, layout="apart")
    source = lowered(match)
    changed = evolve(source, code=source.code.replace(*WRONG[what]))
    assert changed != source
    try:
        assert budget_use(changed, match, graph) > 1.0
    except EmulationError:
        return


@FEW
@given(name=st.sampled_from(("x_first", "x_step", "rest_first", "rest_step", "first")), by=st.integers(1, 999))
def test_what_lies_outside_its_operands_is_refused(name: str, by: int) -> None:
    match, _ = rope_heads_case(heads=3, rotary=8, rest=6, shared=False)
    moved = tuple((key, value + by if key == name else value) for key, value in match.attributes)
    assert FAMILY.accepts(match, H200) is True
    assert FAMILY.accepts(evolve(match, attributes=moved), H200) is not True
