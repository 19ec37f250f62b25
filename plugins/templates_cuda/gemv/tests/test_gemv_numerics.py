"""Every path of the gemv kernels against fp64, on the CPU: unchanged source, checked for races, bounds and early reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_templates_cuda_gemv import GemvFamily
from agentcompile_templates_cuda_gemv.direct_space import direct_schedule
from agentcompile_templates_cuda_gemv.ring_space import ring_schedule
from agentcompile_validator_emulation.module import SCHEDULES
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Expression, Operation, PointwiseKind, Schedule

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from emulated_gemv import check, draw, run, run_source
from gemv_cases import ADD_AUX, BIAS_RESIDUAL, GELU_GATE, SILU_GATE, linear_match

H200, A100 = preset("h200"), preset("a100")
SMALL = settings(max_examples=6, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@frozen(kw_only=True)
class Config:
    """One build: the match without its size, the schedule, and the row lengths that share the build."""

    match: dict[str, object]
    schedule: Schedule
    lengths: tuple[int, ...]
    target: str = "h200"


def _ring(columns: int, **changes: int) -> Schedule:
    return ring_schedule(**{"rows": 2, "columns": columns, "stages": 3, "in_flight": 2, "blocks_per_sm": 2, "specialize_k": False,
                            **changes})


def _tensor(columns: int, **changes: int) -> Schedule:
    return Schedule({**dict(_ring(columns, **changes).items), "path": "tensor"})


def _direct(**changes: int) -> Schedule:
    return direct_schedule(**{"warps_per_row": 1, "rows": 2, "unroll": 4, "blocks_per_sm": 2, **changes})


CONFIGS = {
    "direct_rms_f16": Config(match={"norm": "rms"}, schedule=_direct(), lengths=(8, 256, 1024, 2040, 2048)),
    "direct_block_per_row": Config(match={"aux": 1, "epilogue": ADD_AUX}, schedule=_direct(warps_per_row=8, unroll=2),
                                   lengths=(2056, 4096)),
    "direct_gate": Config(match={"pair": 2, "norm": "rms", "epilogue": SILU_GATE}, schedule=_direct(warps=4, rows=1, warps_per_row=2),
                          lengths=(520, 1024)),
    "direct_layer_bf16": Config(match={"dtype": DType.BF16, "norm": "layer", "norm_bias": True, "aux": 2, "epilogue": BIAS_RESIDUAL},
                                schedule=_direct(rows=4, unroll=2), lengths=(264, 768)),
    "direct_f32_sm80": Config(match={"dtype": DType.F32, "norm": "rms"}, schedule=_direct(rows=1), lengths=(4, 132, 1000), target="a100"),
    "scalar_odd_rows": Config(match={"norm": "rms_one_plus"}, schedule=_direct(unroll=2), lengths=(1, 7, 255)),
    "ring_whole_rows": Config(match={"norm": "rms"}, schedule=_ring(1024), lengths=(8, 520, 1016)),
    "ring_full_slices": Config(match={"aux": 1, "epilogue": ADD_AUX}, schedule=_ring(256), lengths=(256, 512, 1536)),
    "ring_ragged_slices": Config(match={}, schedule=_ring(256, rows=1, in_flight=1), lengths=(264, 776, 1272)),
    "ring_gate": Config(match={"pair": 2, "norm": "rms", "epilogue": GELU_GATE}, schedule=_ring(512, rows=1), lengths=(496, 760)),
    "ring_layer_bf16": Config(match={"dtype": DType.BF16, "norm": "layer", "norm_bias": True},
                              schedule=_ring(512, in_flight=3), lengths=(504, 520)),
    "ring_nine_warps": Config(match={"norm": "rms_one_plus", "dtype": DType.BF16}, schedule=_ring(512, rows=1, warps=9),
                               lengths=(496, 760)),
    "ring_seven_warps_gate": Config(match={"pair": 2, "norm": "layer", "norm_bias": True, "epilogue": SILU_GATE},
                                    schedule=_ring(512, rows=1, warps=7), lengths=(504, 1024)),
    "ring_f32_out": Config(match={"out_dtype": DType.F32}, schedule=_ring(512, stages=2, in_flight=1), lengths=(512, 1024)),
    "ring_one_slot": Config(match={"aux": 1, "epilogue": ADD_AUX}, schedule=_ring(1024, rows=1, warps=6, stages=1, in_flight=1),
                            lengths=(8, 520, 1024)),
    "tensor_whole_rows": Config(match={"norm": "rms"}, schedule=_tensor(1024), lengths=(8, 40, 520, 1016)),
    "tensor_one_slot": Config(match={"dtype": DType.BF16}, schedule=_tensor(1024, rows=1, warps=6, stages=1, in_flight=1),
                              lengths=(520, 1024)),
    "tensor_full_slices": Config(match={"aux": 1, "epilogue": ADD_AUX}, schedule=_tensor(256, rows=1), lengths=(256, 512, 1536)),
    "tensor_ragged_slices": Config(match={}, schedule=_tensor(256, in_flight=1), lengths=(264, 776, 1272)),
    "tensor_gate": Config(match={"pair": 2, "norm": "rms", "epilogue": GELU_GATE}, schedule=_tensor(512, rows=1), lengths=(496, 760)),
    "tensor_gate_of_16": Config(match={"pair": 2, "epilogue": SILU_GATE, "dtype": DType.BF16}, schedule=_tensor(768), lengths=(776, 1536)),
    "tensor_layer_bf16": Config(match={"dtype": DType.BF16, "norm": "layer", "norm_bias": True}, schedule=_tensor(512, in_flight=3),
                                lengths=(504, 520)),
    "tensor_nine_warps": Config(match={"norm": "rms_one_plus", "dtype": DType.BF16}, schedule=_tensor(512, rows=1, warps=9),
                                lengths=(496, 760)),
    "tensor_six_warps": Config(match={"aux": 2, "epilogue": BIAS_RESIDUAL}, schedule=_tensor(1792, rows=1, warps=6), lengths=(1792, 3592)),
    "tensor_seven_warps_gate": Config(match={"pair": 2, "norm": "layer", "norm_bias": True, "epilogue": SILU_GATE},
                                      schedule=_tensor(512, rows=1, warps=7), lengths=(504, 1024)),
    "tensor_twelve_warps": Config(match={}, schedule=_tensor(256, warps=12, stages=2), lengths=(512, 1000)),
    "tensor_f32_out": Config(match={"out_dtype": DType.F32}, schedule=_tensor(512, stages=2, in_flight=1), lengths=(512, 1024)),
}
FEW = evolve(H200, sm_count=2)  # blocks that have several groups of few rows
DEALT = {
    "whole_rows": (1, {"norm": "rms"}, _ring(1024, rows=1), (8, 520, 1016)),
    "slices": (2, {"aux": 1, "epilogue": ADD_AUX}, _ring(256, rows=1, stages=2, in_flight=1), (256, 776)),
    "gate": (1, {"pair": 2, "norm": "rms", "epilogue": SILU_GATE}, _ring(512, rows=2, stages=4, in_flight=4, warps=7), (496, 760)),
    "layer_bf16": (3, {"dtype": DType.BF16, "norm": "layer", "norm_bias": True}, _ring(512, rows=1), (504, 512)),
    "f32_out": (1, {"out_dtype": DType.F32}, _ring(512, rows=1, blocks_per_sm=1, stages=2, in_flight=2), (512, 1024)),
    "tensor_slices": (2, {"aux": 1, "epilogue": ADD_AUX}, _tensor(256, rows=1, stages=2, in_flight=1), (256, 776)),
    "tensor_gate": (1, {"pair": 2, "norm": "rms", "epilogue": SILU_GATE}, _tensor(512, rows=2, stages=4, in_flight=4, warps=7), (496, 760)),
}
EXACT = ("direct_block_per_row", "ring_full_slices", "ring_ragged_slices", "tensor_full_slices", "tensor_ragged_slices")


@pytest.mark.parametrize("name", CONFIGS)
@SMALL
@given(data=st.data())
def test_error_stays_in_budget(name: str, data: st.DataObject) -> None:
    config = CONFIGS[name]
    match = linear_match(data.draw(st.integers(1, 70), "n"), data.draw(st.sampled_from(config.lengths), "k"), **config.match)
    scale = data.draw(st.sampled_from((2.0**-6, 1.0, 4.0)), "scale")
    options = evolve(data.draw(st.sampled_from(SCHEDULES), "order"), programmatic_launch=config.target == "h200")
    tensors = draw(match, data.draw(st.integers(0, 2**31), "seed"), scale=scale)
    source = GemvFamily().lower(match, config.schedule, preset(config.target))
    out = run_source(source, match, tensors, options)
    assert check(match, tensors, out, source.reduction_depth) <= 1.0


@pytest.mark.parametrize("name", DEALT)
@SMALL
@given(data=st.data())
def test_dealt_rows_are_those_of_any_other_deal(name: str, data: st.DataObject) -> None:
    first, changes, plain, lengths = DEALT[name]
    group = plain.integer("warps") * plain.integer("rows")
    least = FEW.sm_count * plain.integer("blocks_per_sm") * first * group
    match = linear_match(data.draw(st.integers(least, least + 7 * group), "n"), data.draw(st.sampled_from(lengths), "k"), **changes)
    tensors = draw(match, data.draw(st.integers(0, 2**31), "seed"))
    options = evolve(data.draw(st.sampled_from(SCHEDULES), "order"), programmatic_launch=True)
    dealt = Schedule({**dict(plain.items), "static_groups": first})
    assert torch.equal(run(match, dealt, FEW, tensors, options), run(match, plain, FEW, tensors))


@pytest.mark.parametrize("name", EXACT)
@SMALL
@given(n=st.integers(1, 40), seed=st.integers(0, 2**31), length=st.integers(0, 2))
def test_integers_are_exact(name: str, n: int, seed: int, length: int) -> None:
    config = CONFIGS[name]
    match = linear_match(n, config.lengths[length % len(config.lengths)], **config.match)
    tensors = draw(match, seed, integers=True)
    expected = tensors["weight"].double().view(n, -1) @ tensors["x"].double()
    if "aux0" in tensors:
        expected += tensors["aux0"].double()
    assert torch.equal(run(match, config.schedule, H200, tensors), expected.half())


@pytest.mark.parametrize("name", ["direct_gate", "ring_gate", "ring_full_slices", "tensor_gate", "tensor_full_slices"])
def test_rows_do_not_depend_on_their_place_or_on_thread_order(name: str) -> None:
    config = CONFIGS[name]
    match = linear_match(45, config.lengths[-1], **config.match)
    tensors = draw(match, 3)
    out = run(match, config.schedule, H200, tensors)
    for options in SCHEDULES:
        assert torch.equal(run(match, config.schedule, H200, tensors, options), out)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(4))
    pair = match.integer("pair")
    moved = {**tensors, "weight": tensors["weight"].view(pair, 45, -1)[:, order].contiguous().view(-1)}
    if "aux0" in tensors:
        moved["aux0"] = tensors["aux0"][order]
    assert torch.equal(run(match, config.schedule, H200, moved), out[order])


@pytest.mark.parametrize("name", ["direct_block_per_row", "ring_ragged_slices", "tensor_ragged_slices"])
def test_powers_of_two_scale_exactly(name: str) -> None:
    config = CONFIGS[name]
    match = linear_match(24, config.lengths[0], **{**config.match, "aux": 0, "epilogue": None})
    tensors = draw(match, 5)
    out = run(match, config.schedule, H200, tensors)
    assert torch.equal(run(match, config.schedule, H200, {**tensors, "x": tensors["x"] * 4}), out * 4)


@pytest.mark.parametrize("name", ["direct_rms_f16", "ring_ragged_slices", "tensor_ragged_slices"])
def test_a_nan_reaches_exactly_the_rows_that_use_it(name: str) -> None:
    config = CONFIGS[name]
    match = linear_match(20, config.lengths[1], **config.match)
    tensors = draw(match, 6)
    tensors["weight"][7 * match.integer("k") + 5] = float("nan")
    assert run(match, config.schedule, H200, tensors).isnan().nonzero().flatten().tolist() == [7]
    tensors = draw(match, 6)
    tensors["x"][-1] = float("nan")
    assert run(match, config.schedule, H200, tensors).isnan().all()


@pytest.mark.parametrize("path", ["direct", "ring", "tensor"])
def test_an_epilogue_rounds_where_its_contract_says(path: str) -> None:
    rounded = Expression(arguments=("acc0", "aux0"), operations=(
        Operation(PointwiseKind.ROUND, ("acc0",)), Operation(PointwiseKind.ADD, (0, "aux0"))))
    schedule = {"ring": _ring(512), "tensor": _tensor(512), "direct": _direct()}[path]
    match = linear_match(50, 504, aux=1, epilogue=rounded)
    tensors = draw(match, 9)
    plain = run(linear_match(50, 504), schedule, H200, tensors)
    assert torch.equal(run(match, schedule, H200, tensors), plain + tensors["aux0"])


def test_misaligned_input_takes_the_scalar_path() -> None:
    config = CONFIGS["direct_rms_f16"]
    match = linear_match(9, 256, **config.match)
    tensors = draw(match, 7, offset=3)
    source = GemvFamily().lower(match, config.schedule, H200)
    assert check(match, tensors, run_source(source, match, tensors, None), source.reduction_depth) <= 1.0


def test_more_blocks_than_rows_and_more_rows_than_one_round() -> None:
    config = CONFIGS["ring_full_slices"]
    for n in (1, 263, 5000):
        match = linear_match(n, 256, **config.match)
        tensors = draw(match, n)
        source = GemvFamily().lower(match, config.schedule, H200)
        assert check(match, tensors, run_source(source, match, tensors, None), source.reduction_depth) <= 1.0


def test_the_budget_refuses_a_result_that_is_slightly_off() -> None:
    config = CONFIGS["ring_full_slices"]
    match = linear_match(32, 512, **config.match)
    tensors = draw(match, 8)
    source = GemvFamily().lower(match, config.schedule, H200)
    out = run_source(source, match, tensors, None)
    assert check(match, tensors, out, source.reduction_depth) <= 1.0
    assert check(match, tensors, (out.float() * 1.002).half(), source.reduction_depth) > 1.0
