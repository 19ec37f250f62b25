"""The elementwise and gather families against torch on the CPU."""

import math

import pytest
import torch
from agentcompile_cuda_kit import pointwise_inputs
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.elementwise import ElementwiseRule
from agentcompile_rules_transformers.testing import Draft, batch_norm_case
from agentcompile_templates_cuda_elementwise import ElementwiseFamily, GatherFamily, elementwise
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import (
    ELEMENTWISE,
    GATHER,
    Access,
    DType,
    Expression,
    Match,
    Operation,
    PointwiseKind,
    Role,
    Schedule,
    SemanticLabel,
    Symbol,
)

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES
from agentcompile_validator_emulation.testing import TINY, TORCH, UNIT, Emulated, aligned, operand

H200 = preset("h200")
POINTWISE, LOOKUP = ElementwiseFamily(), GatherFamily()
FEW = settings(max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
# T(silu(in0)) * in1 + in2, as a gated MLP with a bias would have it
GATE = Expression(arguments=("in0", "in1", "in2"), operations=(
    Operation(PointwiseKind.SILU, ("in0",)), Operation(PointwiseKind.ROUND, (0,)), Operation(PointwiseKind.MUL, (1, "in1")),
    Operation(PointwiseKind.ADD, (2, "in2"))))
SHAPES = {"full": lambda rows, columns: (rows, columns), "row": lambda rows, columns: (columns,), "scalar": lambda rows, columns: (1,)}


def pointwise_match(rows: int, columns: int, broadcasts: tuple[str, ...], expression: Expression | None, dtype: DType,
                    dtypes: tuple[DType, ...] = ()) -> Match:
    types = dtypes or (dtype,) * len(broadcasts)
    operands = [operand(f"in{j}", Role.INPUT, SHAPES[kind](rows, columns), types[j]) for j, kind in enumerate(broadcasts)]
    operands.append(operand("out", Role.OUTPUT, (rows, columns), dtype, Access.WRITE))
    return Match(kind=ELEMENTWISE, label=SemanticLabel.ELEMENTWISE, nodes=("pointwise",), operands=tuple(operands),
                 attributes=(("count", rows * columns), ("columns", columns),
                             *((f"broadcast{j}", kind) for j, kind in enumerate(broadcasts))), epilogue=expression)


def gather_match(rows: int, columns: int, vocabulary: int, dtype: DType = DType.F16) -> Match:
    operands = (operand("ids", Role.INPUT, (1, rows), DType.I64), operand("table", Role.WEIGHT, (vocabulary, columns), dtype),
                operand("out", Role.OUTPUT, (1, rows, columns), dtype, Access.WRITE))
    return Match(kind=GATHER, label=SemanticLabel.GATHER, nodes=("embedding",), operands=operands,
                 attributes=(("rows", rows), ("columns", columns)))


def emulated(match: Match, step: int, threads: int = 64) -> Emulated:
    assert POINTWISE.accepts(match, H200) is True
    return Emulated(POINTWISE.lower(match, Schedule({"step": step, "threads": threads}), H200), match, H200)


def draw(match: Match, seed: int, offset: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {item.name: aligned(torch.randn(item.spec.shape, generator=generator), TORCH[item.spec.dtype], offset)
               for item in match.operands if item.role is not Role.OUTPUT}
    out = match.need("out").spec
    return {**tensors, "out": aligned(torch.full(out.shape, math.nan), TORCH[out.dtype])}


@pytest.mark.parametrize("dtype,step", [(DType.F16, 8), (DType.F16, 2), (DType.BF16, 4), (DType.BF16, 1), (DType.F32, 4), (DType.F32, 2)],
                         ids=str)
@FEW
@given(data=st.data())
def test_gate_within_budget(dtype: DType, step: int, data: st.DataObject) -> None:
    columns = data.draw(st.sampled_from((1, 7, 8, 24, 130)))
    match = pointwise_match(data.draw(st.sampled_from((1, 3, 9))), columns, ("full", "full", "row"), GATE, dtype)
    tensors = draw(match, data.draw(st.integers(0, 99)), data.draw(st.sampled_from((0, 1))))
    emulated(match, step).run(tensors, data.draw(st.sampled_from(SCHEDULES)))
    unit, tiny = UNIT[TORCH[dtype]], TINY[TORCH[dtype]]
    gate = torch.nn.functional.silu(tensors["in0"].double())
    product = gate * tensors["in1"].double()
    expected = product + tensors["in2"].double()
    gate_error = 1.001 * unit * gate.abs() + tiny + 2.0**-21 * gate.abs()
    budget = 1.001 * unit * expected.abs() + tiny + gate_error * tensors["in1"].double().abs() + 2.0**-22 * product.abs()
    assert bool(((tensors["out"].double() - expected).abs() <= budget).all())


CHANGES = {  # what is changed: module, name, value
    "lengths told at launch": (elementwise, "known_length", lambda columns: 0),
    "loads through L1": (pointwise_inputs, "FEW_BYTES", 0),
    "places of 64 bits": (elementwise, "LARGEST", 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_choice_of_a_plan_changes_a_bit(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks whose threads all have a step (1024 elements, 8 for each of 64 threads), with an input that repeats in every row."""
    match = pointwise_match(8, 128, ("full", "full", "row"), GATE, DType.F16)
    found, digests = [], set()
    for changed in (False, True):
        if changed:
            monkeypatch.setattr(*CHANGES[change])
        for offset in (0, 1):
            tensors = draw(match, 5, offset)
            kernel = emulated(match, 8)
            kernel.run(tensors)
            found.append(tensors["out"])
        digests.add(kernel.source.digest)
    assert len(digests) == 2 and torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert torch.equal(found[0], found[1]) and not bool(found[0].isnan().any())


EXACT = {
    PointwiseKind.ABS: torch.abs, PointwiseKind.FLOOR: torch.floor, PointwiseKind.MIN: torch.minimum, PointwiseKind.MAX: torch.maximum,
    PointwiseKind.GREATER: lambda a, b: (a > b).float(), PointwiseKind.AT_LEAST: lambda a, b: (a >= b).float(),
    PointwiseKind.EQUAL: lambda a, b: (a == b).float(), PointwiseKind.WHERE: lambda c, a, b: torch.where(c != 0, a, b),
}
CLOSE = {
    PointwiseKind.SQRT: torch.sqrt, PointwiseKind.LOG: torch.log, PointwiseKind.LOG1P: torch.log1p, PointwiseKind.EXPM1: torch.expm1,
    PointwiseKind.ERF: torch.erf, PointwiseKind.SIN: torch.sin, PointwiseKind.COS: torch.cos,
}


@pytest.mark.parametrize("kind", [*EXACT, *CLOSE], ids=lambda kind: kind.value)
def test_every_word_of_the_grammar_with_nan_and_infinities(kind: PointwiseKind) -> None:
    names = tuple(f"in{j}" for j in range(kind.arity))
    match = pointwise_match(1, 150, ("full",) * kind.arity, Expression(arguments=names, operations=(Operation(kind, names),)),
                            DType.F32)
    tensors = draw(match, 4)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 2.5, -2.5, 1e-30, 100.0])
    for j, name in enumerate(names):
        tensors[name][0, : 11 * 11] = special.repeat(11) if j == 0 else special.repeat_interleave(11).roll(11 * (j - 1))
    emulated(match, 4).run(tensors)
    given_values = [tensors[name] for name in names]
    if kind in EXACT:
        torch.testing.assert_close(tensors["out"], EXACT[kind](*given_values), rtol=0, atol=0, equal_nan=True)
    else:
        expected = CLOSE[kind](*(x.double() for x in given_values)).float()
        torch.testing.assert_close(tensors["out"], expected, rtol=2.0**-21, atol=2.0**-24, equal_nan=True)


@pytest.mark.parametrize("kind", ["channel", "middle"])
@FEW
@given(data=st.data())
def test_inputs_that_repeat_along_axes_are_read_where_they_lie(kind: str, data: st.DataObject) -> None:
    dtype, step = data.draw(st.sampled_from(((DType.F16, 8), (DType.BF16, 1), (DType.F32, 4))))
    before, along, behind = (data.draw(st.sampled_from(sizes)) for sizes in ((1, 2, 5), (1, 3, 8), (1, 4, 8, 13, 24)))
    shape = (before, 1, behind) if kind == "middle" else (along, 1)
    added = Expression(arguments=("in0", "in1"), operations=(Operation(PointwiseKind.SUB, ("in0", "in1")),))
    match = pointwise_match(before * along, behind, ("full", "full"), added, DType.F32, (DType.F32, dtype))
    operands = (match.need("in0"), operand("in1", Role.INPUT, shape, dtype), match.need("out"))
    match = evolve(match, operands=operands, attributes=(*match.attributes[:3], ("broadcast1", kind), ("inner", behind)))
    tensors = draw(match, data.draw(st.integers(0, 99)), data.draw(st.sampled_from((0, 1))))
    emulated(match, min(step, 4)).run(tensors, data.draw(st.sampled_from(SCHEDULES)))
    expected = tensors["in0"].view(before, along, behind) - tensors["in1"].float()
    assert torch.equal(tensors["out"].view(before, along, behind), expected)


@FEW
@given(data=st.data())
def test_mixed_types_in_vectors_of_each_ones_size(data: st.DataObject) -> None:
    product = Expression(arguments=("in0", "in1"), operations=(Operation(PointwiseKind.MUL, ("in0", "in1")),))
    types = (DType.F16, DType.BF16, DType.F32)
    dtypes = data.draw(st.tuples(st.sampled_from(types), st.sampled_from(types)))
    out, kind = data.draw(st.sampled_from(types)), data.draw(st.sampled_from(("full", "scalar", "row")))
    rows, columns = data.draw(st.sampled_from((1, 3))), data.draw(st.sampled_from((8, 40, 128, 129)))
    match = pointwise_match(rows, columns, ("full", kind), product, out, dtypes)
    step = data.draw(st.sampled_from(sorted({point.integer("step") for point in POINTWISE.space(match, H200).points})))
    tensors = draw(match, data.draw(st.integers(0, 99)), data.draw(st.sampled_from((0, 1, 2))))
    emulated(match, step).run(tensors, data.draw(st.sampled_from(SCHEDULES)))
    assert torch.equal(tensors["out"], (tensors["in0"].float() * tensors["in1"].float()).to(TORCH[out]))


@pytest.mark.parametrize("wide", [DType.F32, DType.F16], ids=str)
def test_a_cast_that_stands_alone_is_a_match_where_it_makes_another_type(wide: DType) -> None:
    draft = Draft()
    x = draft.given("in0", (3, 43), DType.F16)
    kind = "cast" if wide is DType.F32 else "pointwise"
    graph = draft.graph(draft.one("aten.to.dtype", (x, Symbol("dtype", wide.value)), (3, 43), wide, kind=kind))
    found = list(ElementwiseRule().find(graph, H200))
    assert len(found) == (wide is DType.F32)
    for match in found:
        tensors = {"in0": torch.randn(3, 43).half(), "out": torch.full((3, 43), math.nan)}
        emulated(match, 4).run(tensors)
        assert torch.equal(tensors["out"], tensors["in0"].float())


def test_copies_of_odd_lengths() -> None:
    copy = pointwise_match(1, 33, ("full",), None, DType.F16)
    tensors = draw(copy, 3)
    emulated(copy, 8).run(tensors)
    assert torch.equal(tensors["out"], tensors["in0"])


@FEW
@given(data=st.data())
def test_gather_copies_rows(data: st.DataObject) -> None:
    columns, dtype = data.draw(st.sampled_from(((1, DType.F16), (7, DType.F32), (64, DType.BF16), (520, DType.F16))))
    rows, vocabulary = data.draw(st.sampled_from((1, 3))), 11
    match = gather_match(rows, columns, vocabulary, dtype)
    table = aligned(torch.randn(vocabulary, columns), TORCH[dtype], data.draw(st.sampled_from((0, 1))))
    ids = torch.tensor([data.draw(st.lists(st.sampled_from((0, 5, vocabulary - 1)), min_size=rows, max_size=rows))])
    tensors = {"ids": ids, "table": table, "out": aligned(torch.full((1, rows, columns), math.nan), TORCH[dtype])}
    assert LOOKUP.accepts(match, H200) is True
    Emulated(LOOKUP.lower(match, Schedule({"threads": 64}), H200), match, H200).run(tensors)
    assert torch.equal(tensors["out"], table[ids])


def part_match(source: torch.Tensor, part: torch.Tensor, dtype: DType) -> Match:
    axes = [(1, 0)] * 4 + [(n, s) for n, s in zip(part.shape, part.stride(), strict=True) if n != 1]
    numbered = [item for i, (n, s) in enumerate(axes[-4:]) for item in ((f"extent{i}", n), (f"stride{i}", s))]
    operands = (operand("in0", Role.INPUT, tuple(source.shape), dtype), operand("out", Role.OUTPUT, tuple(part.shape), dtype, Access.WRITE))
    return Match(kind=ELEMENTWISE, label=SemanticLabel.ELEMENTWISE, nodes=("copy",), operands=operands,
                 attributes=(("count", part.numel()), ("columns", part.shape[-1]), ("broadcast0", "strided"),
                             ("offset", part.storage_offset()), *numbered))


@FEW
@given(data=st.data())
def test_batch_norms_read_one_element_per_channel(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 3)), data.draw(st.sampled_from((1, 2, 5))), *data.draw(st.sampled_from(((), (8,), (3, 4), (7, 1)))))
    match = batch_norm_case(shape=shape, activation="relu", dtype=DType.F32)[0]
    tensors = draw(match, data.draw(st.integers(0, 99)))
    tensors["in2"].abs_()
    emulated(match, data.draw(st.sampled_from((1, 4)))).run(tensors, data.draw(st.sampled_from(SCHEDULES)))
    x, mean, variance, weight, bias = (tensors[f"in{j}"] for j in range(5))
    expected = torch.nn.functional.batch_norm(x, mean, variance, weight, bias).relu()
    torch.testing.assert_close(tensors["out"], expected, rtol=1e-5, atol=1e-4)


@FEW
@given(data=st.data())
def test_a_part_is_copied_in_its_order(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((DType.F16, DType.BF16, DType.F32)))
    source = torch.randn(*(data.draw(st.integers(1, 5)) for _ in range(4))).to(TORCH[dtype])
    part = source.permute(data.draw(st.permutations(range(4))))
    axis = data.draw(st.integers(0, 3))
    first = data.draw(st.integers(0, part.shape[axis] - 1))
    part = part.narrow(axis, first, data.draw(st.integers(1, part.shape[axis] - first)))
    match = part_match(source, part, dtype)
    tensors = {"in0": aligned(source, TORCH[dtype]), "out": aligned(torch.full(part.shape, math.nan), TORCH[dtype])}
    emulated(match, 1).run(tensors, data.draw(st.sampled_from(SCHEDULES)))
    assert torch.equal(tensors["out"], part)


def test_small_ones_are_dealt_out_in_small_vectors_first() -> None:
    first = {count: POINTWISE.space(pointwise_match(1, count, ("full",), None, DType.F16), H200).points[0].integer("step")
             for count in (2048, 151936, 1 << 24)}
    assert first == {2048: 4, 151936: 4, 1 << 24: 8}


def test_spaces_and_rejects() -> None:
    match = pointwise_match(1, 64, ("full", "full", "row"), GATE, DType.F16)
    for family, item in ((POINTWISE, match), (LOOKUP, gather_match(1, 2048, 1000))):
        points = family.space(item, H200).points
        assert 0 < len(points) == len(set(points)) <= 64
    assert "float16" in POINTWISE.accepts(pointwise_match(1, 8, ("full",), None, DType.F16, (DType.I64,)), H200).reason
    assert "7 inputs" in POINTWISE.accepts(pointwise_match(1, 8, ("full",) * 7, None, DType.F16), H200).reason
    part = torch.randn(4, 4).t()
    assert "float16 to float32" in POINTWISE.accepts(evolve(part_match(part, part, DType.F16), operands=(
        operand("in0", Role.INPUT, (4, 4), DType.F16), operand("out", Role.OUTPUT, (4, 4), DType.F32, Access.WRITE))), H200).reason
    assert "serves" in LOOKUP.accepts(match, H200).reason


@pytest.mark.compile
@pytest.mark.parametrize("name", ["a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090"])
def test_builds(name: str) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    gate = pointwise_match(1, 6144, ("full", "full", "row"), GATE, DType.BF16)
    for family, match in ((POINTWISE, gate), (LOOKUP, gather_match(1, 2048, 9))):
        source = family.lower(match, family.space(match, target).points[0], target)
        assert backend.build(source, target).resources.spill_bytes == 0
