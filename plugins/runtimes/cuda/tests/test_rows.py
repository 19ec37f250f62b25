"""Pointwise kernels of prompt chunks, emulated: the framework's numbers, or a refusal."""

import inspect
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import PRESETS, preset
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.rows import GATED, NORM, ROPE, RowKernels, source
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ops import operators
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import DType

HALVES = (torch.float16, torch.bfloat16)
SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=40)


@pytest.fixture(scope="module")
def rows() -> RowKernels:
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    return RowKernels(emulation, lambda: preset("h200"), lambda: False)


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found: torch.Tensor | None, wanted: torch.Tensor) -> None:
    """At most a unit in the last place apart, by the order of a sum or the exponential of another library."""
    assert found is not None and found.dtype is wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1.01 * torch.finfo(wanted.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("name, operator", [(NORM, operators.rms_norm), (ROPE, operators.rope)])
def test_bodies_take_all_that_their_operators_do(rows: RowKernels, name: str, operator: Any) -> None:
    taken, given_ = (inspect.signature(one).parameters for one in (rows.body(name), operator))  # type: ignore[arg-type]
    assert [(p.name, p.default) for p in taken.values()] == [(p.name, p.default) for p in given_.values()]


@SETTINGS
@given(st.data())
def test_norms_are_the_operators(rows: RowKernels, data: st.DataObject) -> None:
    draw, dtype = data.draw, data.draw(st.sampled_from(HALVES))
    columns, count = 8 * draw(st.sampled_from([1, 3, 16, 31, 33, 128, 130, 256])), draw(st.integers(1, 21))
    x = normal(columns, 1, count, columns, dtype=dtype) * draw(st.sampled_from([1e-3, 1.0, 50.0]))
    weight = draw(st.sampled_from([None, normal(1, columns, dtype=dtype)]))
    one_plus, once = draw(st.sampled_from([(False, False), (True, False), (False, True)])) if weight is not None else (False, False)
    body = rows.body(NORM)
    assert body is not None
    near(body(x, weight, 1e-6, one_plus, once), operators.rms_norm(x, weight, 1e-6, one_plus, once))


@SETTINGS
@given(st.data())
def test_rotations_are_the_operators_bit_by_bit(rows: RowKernels, data: st.DataObject) -> None:
    """Of heads as projections lie in memory, of some of their channels, and of a slice of wider rows."""
    draw, dtype = data.draw, data.draw(st.sampled_from(HALVES))
    heads, count, rotary = draw(st.integers(1, 5)), draw(st.integers(1, 40)), 16 * draw(st.integers(1, 4))
    dim, beside = rotary + 8 * draw(st.integers(0, 2)), draw(st.integers(0, 2))
    x = normal(heads, 1, count, heads + beside, dim, dtype=dtype)[:, :, :heads].transpose(1, 2)
    x = x.contiguous() if draw(st.booleans()) else x
    cos, sin = (normal(seed, 1, count, rotary, dtype=dtype) for seed in (1, 2))
    body = rows.body(ROPE)
    assert body is not None
    found, wanted = body(x, cos, sin), operators.rope(x, cos, sin)
    assert found is not None and torch.equal(found, wanted)


@SETTINGS
@given(st.sampled_from(HALVES), st.integers(1, 9), st.integers(1, 400), st.sampled_from([0.01, 1.0, 20.0]))
def test_gates_are_the_operators(rows: RowKernels, dtype: torch.dtype, count: int, vectors: int, scale: float) -> None:
    gate, up = (normal(seed, 1, count, 8 * vectors, dtype=dtype) * scale for seed in (count, vectors + 100))
    body = rows.body(*GATED)
    assert body is not None
    near(body(gate, up), torch.nn.functional.silu(gate) * up)


@SETTINGS
@given(st.data())
def test_merged_parts_are_rounded_once(rows: RowKernels, data: st.DataObject) -> None:
    """Parts of any share, down to none at all: what fp64 says, rounded."""
    draw, dtype = data.draw, data.draw(st.sampled_from(HALVES))
    heads, tokens, dim = draw(st.integers(1, 4)), draw(st.integers(1, 20)), 8 * draw(st.integers(1, 5))
    parts = []
    for i in range(draw(st.integers(2, 5))):
        values = normal(i, 1, tokens, heads, dim, dtype=dtype).transpose(1, 2)
        sums = normal(i + 9, 1, heads, tokens, dtype=torch.float32) * draw(st.sampled_from([0.1, 3.0, 60.0]))
        parts.append((values, sums if draw(st.booleans()) else sums.unsqueeze(-1)))
    out = torch.full((1, tokens, heads, dim), float("nan"), dtype=dtype).transpose(1, 2)
    assert rows.merge(parts, out)
    weights = torch.stack([lse.reshape(1, heads, tokens) for _, lse in parts]).double().softmax(0).unsqueeze(-1)
    wanted = (torch.stack([part for part, _ in parts]).double() * weights).sum(0)
    torch.testing.assert_close(out.double(), wanted, rtol=0.52 * torch.finfo(dtype).eps, atol=2e-6)
    other = torch.empty(1, heads, tokens, dim, dtype=dtype)
    assert not rows.merge(parts * 3, out) and (heads == 1 or tokens == 1 or not rows.merge(parts, other))


def test_what_a_kernel_does_not_take_is_refused(rows: RowKernels) -> None:
    x, weight = normal(0, 1, 4, 64, dtype=torch.float16), normal(1, 64, dtype=torch.float16)
    norm, rope, gated = (rows.body(*ops) for ops in ((NORM,), (ROPE,), GATED))
    assert norm is not None and rope is not None and gated is not None and rows.body("aten.add.Tensor") is None
    refused: list[Any] = [
        norm(x.float(), weight.float(), 1e-6), norm(x[..., :60].contiguous(), weight[:60], 1e-6), norm(x.transpose(1, 2), weight[:4], 1e-6),
        norm(x, weight.float(), 1e-6), norm(x, None, 1e-6, True), gated(x, x[:, :, ::2]), gated(x.float(), x.float()),
        gated(normal(0, 65, dtype=torch.float16)[1:], normal(0, 64, dtype=torch.float16))]
    heads, table = normal(0, 1, 2, 4, 32, dtype=torch.float16), normal(0, 1, 4, 32, dtype=torch.float16)
    refused += [rope(heads, table, table, True), rope(heads, table.float(), table.float()), rope(heads, table[..., :24], table[..., :24]),
                rope(heads[..., ::2], table[..., :16].contiguous(), table[..., :16].contiguous())]
    assert refused == [None] * len(refused)


def test_a_kernel_that_differs_from_the_framework_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    rows = RowKernels(emulation, lambda: preset("h200"), lambda: False)
    launch = rows._launch
    monkeypatch.setattr(rows, "_launch", lambda out, inputs, how: (launch(out, inputs, how), out.mul_(1.01)))
    body, x = rows.body(*GATED), normal(0, 4, 64, dtype=torch.float16)
    assert body is not None and body(x, x) is None and body(x, x) is None


def test_nothing_is_tried_while_a_graph_is_captured() -> None:
    rows = RowKernels(load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation"), lambda: preset("h200"), lambda: True)
    body, x = rows.body(*GATED), normal(0, 4, 64, dtype=torch.float16)
    assert body is not None and body(x, x) is None and rows._served == {}


@pytest.mark.compile
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("name", ["h200", "a100"])
def test_rows_build_without_spilling(dtype: DType, name: str) -> None:
    kernel = CudaBackend().build(source(dtype), PRESETS[name] if name in PRESETS else preset(name))
    assert kernel.resources.spill_bytes == 0 and kernel.resources.registers <= 64
