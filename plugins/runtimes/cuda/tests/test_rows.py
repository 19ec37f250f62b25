"""Pointwise kernels of prompt chunks, emulated: the framework's numbers, or a refusal."""

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from agentcompile_cuda_kit.targets import PRESETS, preset
from agentcompile_runtime_cuda import gated_product, head_places, own_kernels
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.gates import SILU
from agentcompile_runtime_cuda.rows import RowKernels, source
from hypothesis import given
from hypothesis import strategies as st
from row_cases import HALVES, SETTINGS, near, normal
from row_cases import rows as rows

from agentcompile_core.ops import convolution, experts, operators
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import BuildError, DType, Heads, operator_names

GATED, SUM_AND_NORM = (SILU, operator_names.MULTIPLY), (operator_names.ADD, operator_names.RMS_NORM)


@SETTINGS
@given(st.data())
def test_weighed_sums_are_the_frameworks(rows: RowKernels, data: st.DataObject) -> None:
    draw, dtype = data.draw, data.draw(st.sampled_from(HALVES))
    tokens, slots, columns = draw(st.integers(1, 40)), draw(st.integers(1, 9)), 8 * draw(st.integers(1, 40))
    x = normal(columns, tokens, slots, columns, dtype=dtype)
    weights = normal(slots, tokens, slots, 1, dtype=draw(st.sampled_from([dtype, torch.float32])))
    body = rows.body(operator_names.MULTIPLY, operator_names.SUM)
    assert body is not None
    found, wanted = body(x, weights, (1,)), (x * weights).sum(1)
    assert found is not None and found.dtype is wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1.01 * torch.finfo(wanted.dtype).eps,
                               atol=2 * slots * torch.finfo(wanted.dtype).eps)  # sums of another order
    for other in ((x, weights, (0,)), (x, weights[:, :, 0], (1,)), (x.mT, weights, (1,)), (x.float(), weights, (1,)), (x[0], weights, (1,)),
                  (x, weights.double(), (1,))):
        assert body(*other) is None


def test_rows_of_chosen_experts_are_the_operators(rows: RowKernels) -> None:
    generator, body = torch.Generator().manual_seed(0), rows.body(operator_names.EXPERT_LINEAR)
    assert body is not None
    for count, dtype, transposed in ((3, torch.float16, False), (100, torch.bfloat16, False), (9, torch.bfloat16, True)):
        chosen = torch.rand(count, 4, generator=generator).topk(2).indices
        weight, bias = normal(1, 4, *((24, 40) if transposed else (40, 24)), dtype=dtype), normal(2, 4, 40, dtype=dtype)
        for x, added in ((normal(3, count, 1, 24, dtype=dtype), None), (normal(4, count, 2, 24, dtype=dtype), bias)):
            near(body(x, weight, chosen, added, transposed), experts.expert_linear(x, weight, chosen, added, transposed))
            assert body(x.float(), weight.float(), chosen, None, transposed) is None


@pytest.mark.parametrize("name, operator", [
    (operator_names.RMS_NORM, operators.rms_norm), (operator_names.LAYER_NORM, operators.layer_norm), (operator_names.ROPE, operators.rope),
    (operator_names.EXPERT_LINEAR, experts.expert_linear), (operator_names.CONVOLUTION, convolution.causal_convolution)])
def test_bodies_take_all_that_their_operators_do(rows: RowKernels, name: str, operator: Any) -> None:
    taken, given_ = (inspect.signature(one).parameters for one in (rows.body(name), operator))  # type: ignore[arg-type]
    assert [(p.name, p.default) for p in taken.values()] == [(p.name, p.default) for p in given_.values()]


@SETTINGS
@given(st.data())
def test_rotations_are_the_operators_bit_by_bit(rows: RowKernels, data: st.DataObject) -> None:
    """Of heads as projections lie in memory, of some of their channels, and of a slice of wider rows."""
    draw, dtype = data.draw, data.draw(st.sampled_from(HALVES))
    interleaved = draw(st.booleans())
    heads, count, rotary = draw(st.integers(1, 5)), draw(st.integers(1, 40)), (8 if interleaved else 16) * draw(st.integers(1, 4))
    dim, beside = rotary + 8 * draw(st.integers(0, 2)), draw(st.integers(0, 2))
    x = normal(heads, 1, count, heads + beside, dim, dtype=dtype)[:, :, :heads].transpose(1, 2)
    x = x.contiguous() if draw(st.booleans()) else x
    cos, sin = (normal(seed, 1, count, rotary, dtype=dtype) for seed in (1, 2))
    body = rows.body(operator_names.ROPE)
    assert body is not None
    found, wanted = body(x, cos, sin, interleaved), operators.rope(x, cos, sin, interleaved)
    assert found is not None and torch.equal(found, wanted)


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


def placed_by_operators(one: Heads) -> torch.Tensor:
    found = operators.rms_norm(one.rows, *one.norm) if one.norm else one.rows
    return operators.rope(found.float() if one.wide else found, *one.turn).to(found.dtype) if one.turn else found


@SETTINGS
@given(st.data())
def test_heads_are_placed_where_they_belong(rows: RowKernels, data: st.DataObject) -> None:
    """Slices of one product or tensors of their own, by token or by head; some normed, some turned, at any row; nothing else is written."""
    draw, dtype = data.draw, data.draw(st.sampled_from(HALVES))
    count, dim = draw(st.integers(1, 19)), 16 * draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    kv_heads, start, behind = draw(st.integers(1, 3)), draw(st.integers(0, 9)), draw(st.integers(0, 3))
    interleaved, wide = draw(st.booleans()), draw(st.booleans())
    numbers, unit = (kv_heads * draw(st.integers(1, 3)), kv_heads, kv_heads), 8 if interleaved else 16
    rotary = unit * draw(st.integers(1, dim // unit))
    at = draw(st.sampled_from([None, torch.tensor([start])]))
    one_plus, once = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    whole = normal(dim, 1, count, sum(numbers), dim, dtype=dtype).split(numbers, 2)
    apart = [normal(i, 1, count, n, dim, dtype=dtype) for i, n in enumerate(numbers)]
    cos, sin = (normal(seed, 1, count, rotary, dtype=dtype) for seed in (1, 2))
    heads = []
    for i, given_ in enumerate(whole if draw(st.booleans()) else apart):
        norm = draw(st.sampled_from([(), (normal(i, dim, dtype=dtype), 1e-6, one_plus, once)]))
        room = count if i == 0 else start + count + behind
        out = torch.full((1, room, numbers[i], dim), float("nan"), dtype=dtype).transpose(1, 2)
        x = given_.transpose(1, 2)
        x, out = (one.contiguous() if draw(st.booleans()) else one for one in (x, out))
        heads.append(Heads(rows=x, out=out, at=at if i else None, norm=norm,
                           turn=draw(st.sampled_from([(), (cos, sin, interleaved)])), wide=wide))
    with mock.patch.object(head_places, "MANY_THREADS", draw(st.sampled_from([1, head_places.MANY_THREADS]))):  # tokens of a thread
        assert rows.place(heads)
    for one in heads:
        first = 0 if one.at is None else start
        wanted = torch.full_like(one.out, float("nan"))
        wanted[:, :, first : first + count] = placed_by_operators(one)
        if one.norm and one.turn:  # a norm that is a unit off turns into an element that is that much of the other off
            torch.testing.assert_close(one.out, wanted, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps, equal_nan=True)
        elif one.norm:
            torch.testing.assert_close(one.out, wanted, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)
        else:
            assert torch.equal(one.out.nan_to_num(), wanted.nan_to_num()) and torch.equal(one.out.isnan(), wanted.isnan())


def test_rows_behind_a_cache_are_not_written(rows: RowKernels) -> None:
    count, memory = 6, torch.zeros(3, 8, 2, 32, dtype=torch.float16)
    given_ = [normal(i, 1, count, 2, 32, dtype=torch.float16).transpose(1, 2) for i in range(3)]
    at = torch.tensor([0])
    heads = [Heads(rows=x, out=memory[i : i + 1, :7].transpose(1, 2), at=at if i else None) for i, x in enumerate(given_)]
    assert rows.place(heads)
    memory.zero_()
    at.fill_(4)
    assert rows.place(heads)
    assert torch.equal(memory[1, 4:7].transpose(0, 1), given_[1][0, :, :3]) and not memory[1, :4].any() and not memory[:, 7].any()


def test_heads_that_the_kernel_does_not_take_are_refused(rows: RowKernels) -> None:
    def three(**others: Any) -> list[Heads]:
        found = []
        for i in range(3):
            given_ = {"rows": normal(i, 1, 5, 2, 32, dtype=torch.float16).transpose(1, 2),
                      "out": torch.zeros(1, 9, 2, 32, dtype=torch.float16).transpose(1, 2), **(others if i == 1 else {})}
            found.append(Heads(**given_))
        return found

    table, weight = normal(0, 1, 5, 32, dtype=torch.float16), normal(0, 32, dtype=torch.float16)
    wide = normal(0, 1, 5, 2, 48, dtype=torch.float16).transpose(1, 2)
    assert rows.place(three()) and rows.place(three(turn=(table, table, False), norm=(weight, 1e-6, False, False)))
    refused: list[dict[str, Any]] = [
        {"turn": (table.float(), table, False)}, {"turn": (table[..., :24].contiguous(), table, False)},
        {"norm": (weight.float(), 1e-6, False, False)}, {"norm": (None, 1e-6, True, False)}, {"rows": wide},
        {"out": torch.zeros(1, 9, 2, 32).transpose(1, 2)}, {"rows": normal(0, 1, 2, 32, 5, dtype=torch.float16).transpose(2, 3)}]
    assert [rows.place(three(**one)) for one in refused] == [False] * len(refused)
    first = three()
    first[0] = Heads(rows=first[0].rows, out=first[0].out, at=torch.tensor([1]))
    assert not rows.place(first)
    for other in ({"turn": (table, table, True)}, {"turn": (table, table, False), "wide": True}):  # queries turn in another way
        both = three(**other)
        both[0] = Heads(rows=both[0].rows, out=both[0].out, turn=(table, table, False))
        assert not rows.place(both)


def test_what_a_kernel_does_not_take_is_refused(rows: RowKernels) -> None:
    x, weight = normal(0, 1, 4, 64, dtype=torch.float16), normal(1, 64, dtype=torch.float16)
    norm, rope, gated = (rows.body(*ops) for ops in ((operator_names.RMS_NORM,), (operator_names.ROPE,), GATED))
    assert norm is not None and rope is not None and gated is not None and rows.body("aten.add.Tensor") is None
    refused: list[Any] = [
        norm(x.double(), weight.double(), 1e-6), norm(x[..., :60].contiguous(), weight[:60], 1e-6),
        norm(x.transpose(1, 2), weight[:4], 1e-6),
        norm(x, weight.float(), 1e-6), norm(x, None, 1e-6, True), gated(x, x[:, :, ::2]), gated(x.double(), x.double()),
        gated(normal(0, 65, dtype=torch.float16)[1:], normal(0, 64, dtype=torch.float16))]
    heads, table = normal(0, 1, 2, 4, 32, dtype=torch.float16), normal(0, 1, 4, 32, dtype=torch.float16)
    refused += [rope(heads, table.float(), table.float()), rope(heads, table[..., :24], table[..., :24]),
                rope(heads[..., ::2], table[..., :16].contiguous(), table[..., :16].contiguous())]
    assert refused == [None] * len(refused)


def test_a_kernel_that_differs_from_the_framework_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    rows = RowKernels(emulation, lambda: preset("h200"), lambda: False)
    launch = rows._launch
    for one in (rows, rows._norms):
        monkeypatch.setattr(one, "_launch", lambda tensors, how: (launch(tensors, how), tensors[-1].mul_(1.01)))
    body, x = rows.body(*GATED), normal(0, 4, 64, dtype=torch.float16)
    assert body is not None and body(x, x) is None and body(x, x) is None
    both = rows.body(*SUM_AND_NORM)
    assert both is not None and both(x, x, x[0], 1e-6) is None
    assert (layer := rows.body(operator_names.ATEN_LAYER_NORM)) is not None and layer(x, (64,)) is None
    product, place = rows.body(operator_names.LINEAR), torch.zeros(4, 4, dtype=torch.float16)
    skinny = rows._skinny.plain
    monkeypatch.setattr(rows._skinny, "plain", lambda *given: (skinny(*given), given[-1].mul_(1.01)))
    assert product is not None and product(x, x) is None and product(x, x, out=place) is None
    heads = [Heads(rows=x.view(1, 4, 4, 16), out=torch.empty(1, 4, 4, 16, dtype=torch.float16)) for _ in range(3)]
    assert not rows.place(heads) and not rows.place(heads)


def test_nothing_is_tried_while_a_graph_is_captured() -> None:
    rows = RowKernels(load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation"), lambda: preset("h200"), lambda: True)
    body, x = rows.body(*GATED), normal(0, 4, 64, dtype=torch.float16)
    assert body is not None and body(x, x) is None and rows._served == {}


@pytest.mark.parametrize("name", ["h200", "a100"])
def test_kernels_begin_early_where_the_device_knows_how(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    prepare, early = type(emulation).prepare_launch, list[bool]()

    def prepare_launch(self: Any, handle: Any, launch: Any, arguments: Any, pdl: bool) -> Any:
        early.append(pdl)
        return prepare(self, handle, launch, arguments, pdl)

    monkeypatch.setattr(type(emulation), "prepare_launch", prepare_launch)
    body = RowKernels(emulation, lambda: preset(name), lambda: False).body(operator_names.RMS_NORM)
    assert body is not None and body(normal(0, 1, 4, 64, dtype=torch.float16), None, 1e-6) is not None
    assert early and set(early) == {name == "h200"}


@pytest.mark.compile
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("name", ["h200", "a100"])
def test_rows_build_without_spilling(dtype: DType, name: str) -> None:
    kernel = CudaBackend().build(source(dtype), PRESETS[name] if name in PRESETS else preset(name))
    assert kernel.resources.spill_bytes == 0 and kernel.resources.registers <= 80  # three blocks of 256 threads on an SM


def test_what_else_serves_prompts_is_built_beside_the_first_kernel_and_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    built: list[str] = []
    build = type(emulation).build

    def counted(self: Any, source: Any, *more: Any) -> Any:
        built.append(source.digest)
        return build(self, source, *more)

    monkeypatch.setattr(type(emulation), "build", counted)
    monkeypatch.setattr(own_kernels, "_builds", {})
    x, started = normal(3, 1, 5, 64, dtype=torch.float16), list[torch.dtype]()
    for _ in range(2):
        kernels = RowKernels(emulation, lambda: preset("h200"), lambda: False, (lambda like: started.append(like.dtype),))
        body = kernels.body(operator_names.RMS_NORM)
        assert body is not None
        assert body(x, None, 1e-6, False, False) is not None and body(x[:, :2], None, 1e-6, False, False) is not None
    assert started == [torch.float16] * 2
    wanted = {source(DType.F16).digest, gated_product.source(DType.F16).digest}
    for future in list(own_kernels._builds.values()):
        future.result()
    assert sorted(built) == sorted(wanted)


def test_what_could_not_be_built_is_told_to_everybody_who_asks_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    monkeypatch.setattr(own_kernels, "_builds", {})
    answers = iter([BuildError("no compiler"), BuildError("no compiler"), None])

    def fails(*_: Any) -> Any:
        answer = next(answers)
        if answer is not None:
            raise answer
        return "kernel"

    monkeypatch.setattr(type(emulation), "build", fails)
    monkeypatch.setattr(type(emulation), "load", lambda self, kernel: kernel)
    kernels = own_kernels.OwnKernels(emulation, lambda: preset("h200"), source)
    for _ in range(2):
        with pytest.raises(BuildError, match="no compiler"):
            kernels.launches(normal(3, 4, dtype=torch.float16))
    assert kernels.launches(normal(3, 4, dtype=torch.float16))
