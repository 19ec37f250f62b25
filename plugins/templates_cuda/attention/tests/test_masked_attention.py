"""The masked attention family against fp64 on the CPU: masks, steps, groups, tails, rows that see nothing; and wrong kernels."""

import math

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import masked_attention_case
from agentcompile_templates_cuda_attention import MaskedAttentionFamily
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentcompile_core.plugin_api import DType, Match, Schedule, StepSource

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES
from agentcompile_validator_emulation.testing import TORCH, UNIT, Emulated, aligned

H200 = preset("h200")
FAMILY = MaskedAttentionFamily()
FEW = settings(max_examples=4, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def seen_of(match: Match, tensors: dict[str, Tensor]) -> Tensor:
    """What is added to the scores, float64 [batch, heads, rows, keys]."""
    shape = tuple(match.integer(name) for name in ("batch", "heads", "rows", "keys"))
    mask = tensors.get("mask")
    if mask is None:
        hidden = ~torch.ones(shape[2:], dtype=torch.bool).tril() if match.flag("causal") else torch.zeros(shape[2:], dtype=torch.bool)
        return torch.zeros(shape, dtype=torch.float64).masked_fill(hidden, -math.inf)
    added = torch.zeros(shape, dtype=torch.float64)
    return added.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else added + mask


def side(match: Match, tensors: dict[str, Tensor], name: str, extent: str, width: str) -> Tensor:
    heads = "heads" if name == "q" else "kv_heads"
    shape = [match.integer(each) for each in ("batch", heads, extent, width)]
    steps = [match.integer(f"{name}_{axis}") for axis in ("batch", "head", "row", "column")]
    found = tensors[name].as_strided(shape, steps, tensors[name].storage_offset() + match.integer(f"{name}_offset")).double()
    return found.repeat_interleave(match.integer("heads") // shape[1], 1)


def draw(match: Match, seed: int, hidden: float = 0.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for operand in match.operands:
        values = torch.randn(operand.spec.shape, generator=generator)
        if operand.spec.dtype is DType.BOOL:
            tensors[operand.name] = values > 0.0
            continue
        if operand.name == "mask":
            values[torch.rand(values.shape, generator=generator) < hidden] = -math.inf
        tensors[operand.name] = aligned(torch.full_like(values, math.nan) if operand.name == "out" else values, TORCH[operand.spec.dtype])
    return tensors


def result(match: Match, tensors: dict[str, Tensor]) -> Tensor:
    shape = [match.integer(each) for each in ("batch", "heads", "rows", "value_dim")]
    steps = [match.integer(f"out_{axis}") for axis in ("batch", "head", "row")]
    return tensors["out"].as_strided(shape, [*steps, 1], tensors["out"].storage_offset()).double()


def wanted(match: Match, tensors: dict[str, Tensor]) -> Tensor:
    """Rows that see nothing are zero."""
    q, k, v = (side(match, tensors, *names) for names in (("q", "rows", "head_dim"), ("k", "keys", "head_dim"), ("v", "keys", "value_dim")))
    return (q @ k.transpose(-1, -2) * match.number("scale") + seen_of(match, tensors)).softmax(-1).nan_to_num(0.0) @ v


def lowered(match: Match, warps: int, rows: int) -> StepSource:
    assert FAMILY.accepts(match, H200) is True
    return FAMILY.lower(match, Schedule({"warps": warps, "rows_per_warp": rows}), H200)


@pytest.mark.parametrize("dtype,kind", [(DType.F16, "seen"), (DType.BF16, "added"), (DType.F32, "causal"), (DType.F32, "none")], ids=str)
@FEW
@given(data=st.data())
def test_within_a_rounding(dtype: DType, kind: str, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from((1, 2)))
    batch, rows, keys = (data.draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 3, 10), (1, 31, 33, 70)))
    sizes = (batch, 2 * group, 2, rows, keys, 8 if kind == "seen" else 20)
    shapes = ((batch, 1, 1, keys), (1, 2 * group, rows, keys), (rows, keys), (1, 1, rows, 1)) if kind in ("seen", "added") else ((),)
    mask = data.draw(st.sampled_from(shapes))
    match = masked_attention_case(sizes=sizes, value_dim=36 if kind == "none" else 0, mask=mask, added=kind == "added",
                                  causal=kind == "causal", turned=data.draw(st.booleans()), dtype=dtype)[0]
    tensors = draw(match, data.draw(st.integers(0, 99)), 0.3)
    Emulated(lowered(match, 2, 2), match, H200).run(tensors, data.draw(st.sampled_from(SCHEDULES)))
    expected = wanted(match, tensors)
    assert (result(match, tensors) - expected).abs().max() <= UNIT[tensors["out"].dtype] * (expected.abs().max() * 1.01 + 2.0**-10) + 2e-6


def test_wide_heads_are_read_where_they_are_and_a_nan_stays_in_its_row() -> None:
    match = masked_attention_case(sizes=(1, 1, 1, 3, 5, 160), dtype=DType.F32)[0]
    tensors = draw(match, 3)
    tensors["q"].view(3, 160)[1, 7] = math.nan
    Emulated(lowered(match, 1, 2), match, H200).run(tensors)
    found, expected = result(match, tensors)[0, 0], wanted(match, tensors)[0, 0]
    assert bool(found[1].isnan().all()) and torch.allclose(found[[0, 2]], expected[[0, 2]], atol=1e-5)


WRONG = {
    "keys behind the last count": ("row < rows && key < keys && ", "row < rows && "),
    "what was added is not scaled": ("totals[r][s] *= shrunk;", "totals[r][s] *= 1.0f;"),
    "the head of another group": ("(head / group) * v_head", "head * v_head"),
    "the mask is not read": ("score = masked(score, mask, own_mask + row * mask_row + key * mask_column);", ""),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    match = masked_attention_case(sizes=(1, 4, 2, 3, 40, 8), mask=(3, 40), dtype=DType.F32)[0]
    source, (text, wrong) = lowered(match, 2, 2), WRONG[what]
    assert text in source.code
    tensors = draw(match, 5)
    try:
        Emulated(evolve(source, code=source.code.replace(text, wrong)), match, H200).run(tensors)
    except Exception as exc:
        assert "Emulation" in type(exc).__name__
        return
    assert not torch.allclose(result(match, tensors), wanted(match, tensors), atol=1e-4)
