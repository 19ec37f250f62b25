"""Attention of prompt chunks by the kernel of attend.cu, emulated with every check on: fp64's numbers, in any layout; and wrong kernels."""

import math

import pytest
import torch
from agentcompile_cuda_kit import include_dir
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.own_attention import (
    DEEP,
    THREE,
    TILES,
    TWO,
    WIDE,
    DeviceScoring,
    Form,
    OwnAttention,
    Shape,
    called,
    form_of,
    shape_of,
    source,
)
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import DType, StepSource

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError, LaunchOptions
from agentcompile_validator_emulation.testing import run_called, some

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
HALVES = {DType.F16: torch.float16, DType.BF16: torch.bfloat16}
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@frozen(kw_only=True)
class Chunk:
    """``count`` rows behind ``start`` others, and how they lie: by row or by head, with channels beside them and rows behind them."""

    count: int
    start: int
    kv_heads: int = 1
    share: int = 1
    beside: int = 0
    behind: int = 3
    by_head: bool = False
    spread: float = 1.0
    window: int = 0
    seed: int = 0

    def scores(self, form: Form, dim: int, dtype: torch.dtype) -> DeviceScoring:
        """What becomes of scores where the kernel has ``form``, for heads of ``dim`` channels."""
        sinks = torch.randn(self.kv_heads * self.share, generator=torch.Generator().manual_seed(self.seed)).mul(3).to(dtype)
        return DeviceScoring(scale=dim**-0.5, window=self.window if form.windowed else 0, softcap=2.5 if form.capped else 0.0,
                      sinks=sinks if form.sinks else None, slopes=0.02 * (1 + torch.arange(len(sinks))) if form.slopes else None)

    def operands(self, dim: int, dtype: torch.dtype, value_dim: int = 0) -> tuple[Operands, dict[str, torch.Tensor]]:
        """q, k, v, out [1, H, T, D], and the memory that each lies in: NaN wherever no row of it is."""
        generator = torch.Generator().manual_seed(self.seed)
        heads, rows, key_dim, wide = self.kv_heads * self.share, self.start + self.count, dim, value_dim or dim
        sizes = {"q": (self.count, heads), "k": (rows, self.kv_heads), "v": (rows, self.kv_heads), "out": (self.count, heads)}
        memory, made = {}, []
        for name, (count, number) in sizes.items():
            dim = key_dim if name in "qk" else wide
            size = (number, count + self.behind) if self.by_head else (count + self.behind, number)
            flat = torch.full((*size, dim + 8 * self.beside), math.nan, dtype=dtype)
            one = (flat if self.by_head else flat.transpose(0, 1))[None, :, :count, :dim]
            if name != "out":
                one.copy_(torch.randn(one.shape, generator=generator) * (self.spread if name == "q" else 1.0))
            memory[name] = flat.view(-1)
            made.append(one)
        q, k, v, out = made
        return (q, k, v, out), memory


CHUNKS = st.builds(Chunk, count=st.integers(1, 300), start=st.integers(0, 300), kv_heads=st.integers(1, 2), share=st.integers(1, 3),
                   beside=st.integers(0, 2), behind=st.integers(0, 140), by_head=st.booleans(), spread=st.sampled_from([0.1, 1.0, 8.0]),
                   seed=st.integers(0, 99))


def exact(operands: Operands, how: DeviceScoring) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in fp64, and what its weights make of the values' sizes."""
    q, k, v, _ = operands
    k, v = (one.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - k.shape[2] + q.shape[2]
    scores = q.double() @ k.mT * how.scale
    scores = how.softcap * torch.tanh(scores / how.softcap) if how.softcap else scores
    if how.slopes is not None:
        scores = scores + how.slopes.double()[:, None, None] * ahead
    scores = scores.masked_fill((ahead > 0) | (ahead <= -how.window) if how.window else ahead > 0, -math.inf)
    sinks = torch.full((q.shape[1],), -math.inf) if how.sinks is None else how.sinks
    weights = torch.cat((scores, sinks.double()[None, :, None, None].expand(1, -1, q.shape[2], 1)), -1).softmax(-1)[..., :-1]
    return weights @ v, weights @ v.abs()


def error(operands: Operands, how: DeviceScoring) -> float:
    """Of the result, in units of what two roundings to 16 bits and fp32 scores leave open; infinite for NaN."""
    wanted, sizes = exact(operands, how)
    bound = 2.1 * torch.finfo(operands[3].dtype).eps / 2 * sizes + 1e-5
    return float(((operands[3].double() - wanted).abs() / bound).nan_to_num(math.inf).max())


def attend(kernel: StepSource, form: Form, shape: Shape, chunk: Chunk, options: LaunchOptions, blocks: int = 2, missing: int = 0) -> float:
    """Runs the kernel on so many blocks, checked, on heads that lack ``missing`` channels of its form; the error. Raises EmulationError."""
    dtype = HALVES[DType.BF16 if "bfloat16" in dict(kernel.headers)["plan.cuh"] else DType.F16]
    operands, memory = chunk.operands(form.dim - missing, dtype, form.value_dim - missing)
    how = chunk.scores(form, form.dim - missing, dtype)
    launch = kernel.launches[0]
    memory |= {name: one for name, one in (("sinks", how.sinks), ("slopes", how.slopes)) if one is not None}
    launch = evolve(launch, arguments=tuple(evolve(one, operand=one.operand if one.operand in memory else "") for one in launch.arguments))
    call = called(launch, operands, shape, how)
    run_called(kernel, call, min(blocks, int(call[1][TILES])), memory, options)
    found = error(operands, how)
    operands[3].fill_(math.nan)
    return found if memory["out"].isnan().all() else math.inf  # else it wrote beside its rows


PLAIN_64, PLAIN_128 = Form(dim=64, value_dim=64), Form()
KERNELS = {f"{form.dim} and {form.value_dim}, {shape.groups} warpgroups, {dtype.value}{words}": (dtype, form, shape)
           for form, shape, dtypes, words in (
               (PLAIN_64, TWO, HALVES, ""), (PLAIN_64, THREE, HALVES, ""), (PLAIN_128, TWO, HALVES, ""),
               (PLAIN_128, DEEP, HALVES, ", 192 keys"),
               (evolve(PLAIN_128, windowed=True), TWO, (DType.BF16,), ", windows"),
               (Form(dim=256, value_dim=256, windowed=True, capped=True), WIDE, (DType.BF16,), ", windows and a cap"),
               (evolve(PLAIN_64, windowed=True, sinks=True), THREE, (DType.BF16,), ", windows and sinks"),
               (evolve(PLAIN_64, windowed=True, slopes=True, capped=True, sinks=True), TWO, (DType.F16,), ", everything"),
               (Form(dim=192, value_dim=128), TWO, (DType.F16,), ""))
           for dtype in dtypes}


@pytest.mark.parametrize("name", KERNELS)
@SETTINGS
@given(data=st.data())
def test_any_chunk_has_fp64s_attention(name: str, data: st.DataObject) -> None:
    """Over one block of keys or several, tiles that are not full, blocks that take several tiles, heads of fewer channels, windows of any
    length, in six orders of threads and copies."""
    dtype, form, shape = KERNELS[name]
    chunk, options = data.draw(CHUNKS), evolve(data.draw(st.sampled_from(SCHEDULES)), seed=data.draw(st.integers(0, 99)))
    chunk = evolve(chunk, window=data.draw(st.integers(1, 320)))
    missing = 8 * data.draw(st.sampled_from((0, 0, 1, 4)))
    assert attend(source(dtype, form, shape), form, shape, chunk, options, data.draw(st.integers(1, 5)), missing) <= 1.0


EDGES = [(1, 0), (1, 127), (1, 128), (2, 127), (64, 64), (65, 63), (127, 1), (128, 0), (129, 0), (192, 64)]


@pytest.mark.parametrize("form", [PLAIN_64, PLAIN_128], ids=["64", "128"])
@pytest.mark.parametrize("count, start", EDGES)
def test_edges_of_tiles_and_of_blocks_of_keys(form: Form, count: int, start: int) -> None:
    for options in (SCHEDULES[0], SCHEDULES[1]):
        assert attend(source(DType.F16, form, TWO), form, TWO, Chunk(count=count, start=start, behind=0), options) <= 1.0


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 127, 128, 129, 200, 2**31 - 2])
def test_edges_of_windows(window: int) -> None:
    form = evolve(PLAIN_128, windowed=True)
    for count, start in ((130, 255), (257, 0)):
        chunk = Chunk(count=count, start=start, behind=0, window=window)
        assert attend(source(DType.F16, form, TWO), form, TWO, chunk, SCHEDULES[0]) <= 1.0


@pytest.mark.parametrize("dtype", HALVES.values())
def test_calls_through_a_backend(dtype: torch.dtype) -> None:
    """As the runtime makes them: which kernel, how many blocks, whose addresses."""
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    own = OwnAttention(emulation, lambda: evolve(preset("h200"), sm_count=3))
    for dim, chunk, shape in ((64, Chunk(count=150, start=75, share=3), None), (64, Chunk(count=200, start=9), THREE),
                              (128, Chunk(count=140, start=0, kv_heads=2, by_head=True), None), (96, Chunk(count=30, start=80), None)):
        operands, _ = chunk.operands(dim, dtype)
        sinks = torch.linspace(-1, 3, operands[0].shape[1]).to(dtype)
        ways = ({"scale": 0.1}, {"scale": 0.1, "window": 70}, {"scale": 0.1, "sinks": sinks}, {"scale": 0.2, "softcap": 1.5},
                {"scale": 0.1, "slopes": sinks.float()})
        for how in (DeviceScoring(**way) for way in ways):
            assert own.takes(operands, how) and own.wins(*operands[:3], how)
            own(operands, how, shape)
            assert error(operands, how) <= 1.0
    q, k, v, out = operands
    for other in ({"scale": 0.0}, {"window": -1}, {"sinks": sinks.double()}, {"slopes": sinks}, {"sinks": sinks.repeat(2)},
                  {"softcap": math.inf}):
        assert not own.takes(operands, DeviceScoring(**{"scale": 0.1, **other}))
    for given_ in ((q, k, v, out[..., :64]), (q[..., :40], k[..., :40], v[..., :40], out[..., :40]), (q, k, v[..., :91], out[..., :91])):
        assert not own.takes(given_, DeviceScoring(scale=0.1))


def test_every_width_has_a_form_that_fits_a_block() -> None:
    """In shared memory, and in what its instructions take."""
    room = preset("h100").shared_bytes_per_block
    for dim in range(64, 257, 8):
        for value_dim in range(64, 257, 8):
            form = form_of(dim, value_dim, DeviceScoring(scale=1.0))
            assert form is not None and form.dim - 64 < dim <= form.dim and value_dim <= form.value_dim
            for count, seen in ((1, 1), (1, 9000), (9000, 9000)):
                assert shape_of(form, count, seen).shared_bytes(form) <= room
    assert form_of(56, 64, DeviceScoring(scale=1.0)) is None and form_of(64, 264, DeviceScoring(scale=1.0)) is None


@pytest.mark.parametrize("count, seen, shape", [(1, 8191, TWO), (1, 8192, DEEP), (4096, 4096, TWO), (8192, 8192, DEEP)])
def test_many_rows_are_seen_in_larger_blocks(count: int, seen: int, shape: Shape) -> None:
    """By heads of 128 channels that are scaled and no more; docs/decisions/0038 has the figures."""
    assert shape_of(PLAIN_128, count, seen) == shape
    assert shape_of(evolve(PLAIN_128, windowed=True), count, seen) == TWO and shape_of(PLAIN_64, 1, seen) == TWO


UNCHANGED = "ac::quick_exp2((most[h] - reach) * scale)"


def drift(kernel: StepSource) -> float:
    """The error over 4,096 equal keys with scores of 839: what is multiplied for each of 32 blocks of keys must be 1 exactly.

    Values of the first half and of the second one cancel out.
    """
    operands, memory = Chunk(count=1, start=4095, behind=0).operands(64, torch.float16)
    q, k, v, _ = operands
    q.fill_(8.390625)  # a score whose product with the scale is half a place from what fp32 has
    k.fill_(12.5)
    v[:, :, :2048] = 1.0
    v[:, :, 2048:] = -1.0
    launch = kernel.launches[0]
    launch = evolve(launch, arguments=tuple(evolve(one, operand=one.operand if one.operand in memory else "") for one in launch.arguments))
    run_called(kernel, called(launch, operands, TWO, DeviceScoring(scale=64**-0.5)), 1, memory, SCHEDULES[0])
    return error(operands, DeviceScoring(scale=64**-0.5))


def test_keys_that_are_long_ago_weigh_what_they_did() -> None:
    """A product and a difference that a compiler fuses are not 0 where both are equal: the host compiles them apart, a GPU does not."""
    made = source(DType.F16, PLAIN_64, TWO)
    assert UNCHANGED in made.code
    right, fused = drift(made), drift(evolve(made, code=made.code.replace(UNCHANGED, "ac::quick_exp2(fmaf(most[h], scale, -shift))")))
    assert right <= 0.02 < 0.2 <= fused


RELEASE_QUERIES, WAIT_FOR_QUERIES = "    release(q_free);\n", "    ac::mbarrier_wait(q_full, round % 2);\n"
ADD_VALUES, RELEASE_VALUES = "      add_values(o, weights, v_turn.stage);\n", "      release(v_free + v_turn.stage);\n"
MUTANTS: dict[str, list[tuple[str, str]]] = {  # what is wrong; texts, and with what they are replaced
    "the mask lets one key too many in": [("behind > 0 ||", "behind > 1 ||")],
    "the mask leaves the last key out": [("behind > 0 ||", "behind >= 0 ||")],
    "the mask has columns of a neighbour": [("threadIdx.x % 4 * 2", "(threadIdx.x + 1) % 4 * 2")],
    "a block that needs the mask goes without": [("(block + 1) * keys > start", "(block + 1) * keys > 64 + start")],
    "the last block of keys is left out": [("(seen + keys - 1) / keys", "seen / keys")],
    "scores are used before their wait": [("wg::wait<0>();\n    wg::settle(s);", "wg::wait<1>();")],
    "sums are used before their wait": [("      wg::wait<0>();\n      wg::settle(o);", "      wg::wait<1>();")],
    "the last products are not waited for": [("    wg::wait<0>();\n    wg::settle(o);", "    wg::wait<1>();")],
    "a wait is missing": [("      wg::wait<1>();\n      wg::settle(s);\n", "")],
    # In the loop it is no mistake: the producer waits for values before it comes to that place, and these are given back later.
    "keys are given back before the wait": [
        ("    wg::wait<0>();\n    wg::settle(s);\n    release(k_free + k_turn.stage);\n",
         "    release(k_free + k_turn.stage);\n    wg::wait<0>();\n    wg::settle(s);\n")],
    "queries are never given back": [(RELEASE_QUERIES, "")],
    "queries are given back before their products": [
        (RELEASE_QUERIES, ""), (WAIT_FOR_QUERIES, WAIT_FOR_QUERIES + RELEASE_QUERIES)],
    "values are given back before the wait": [(RELEASE_VALUES, ""), (ADD_VALUES, ADD_VALUES + RELEASE_VALUES)],
    "keys of the phase before are taken": [("k_turn.parity);", "k_turn.parity ^ 1);")],
    "values of the phase before are taken": [("v_turn.parity);", "v_turn.parity ^ 1);")],
    "queries of the phase before are taken": [("ac::mbarrier_wait(q_full, round % 2);", "ac::mbarrier_wait(q_full, 0);")],
    "queries are fetched over those in use": [("ac::mbarrier_wait(q_free, round % 2 ^ 1);", "")],
    "keys are fetched over those in use": [("ac::mbarrier_wait(k_free + turn.stage, turn.parity ^ 1);", "")],
    "values are fetched over those in use": [("ac::mbarrier_wait(v_free + turn.stage, turn.parity ^ 1);", "")],
    "one warp is not counted": [("ac::mbarrier_init(k_free + stage, groups * 4)", "ac::mbarrier_init(k_free + stage, groups * 4 - 1)")],
    "a panel is not fetched": [("p < panels; ++p) {\n          wg::fetch<1>(q_place", "p < 1; ++p) {\n          wg::fetch<1>(q_place")],
    "a panel is not fetched, nor expected": [
        ("p < panels; ++p) {\n            wg::fetch<1>(k_ring", "p < 1; ++p) {\n            wg::fetch<1>(k_ring"),
        ("(k_full + turn.stage, k_elements * sizeof(T))", "(k_full + turn.stage, k_elements / panels * sizeof(T))")],
    "panels of queries lie closer": [("p * (rows * 128 / 16)", "p * (rows * 64 / 16)")],
    "panels of keys lie closer": [("p * (keys * 128 / 16)", "p * (64 * 128 / 16)")],
    "the second half of the values is the first": [("part * (value_panels * panel_elements * 2 / 16)", "part * 0")],
    "values are fetched from the first half": [("block * keys + part * wg::panel_spans", "block * keys")],
    "panels of values lie apart": [("panels = panel_spans * 128 / 16", "panels = 2 * panel_spans * 128 / 16")],
    "groups of spans lie apart": [("eight_spans / 16", "2 * eight_spans / 16")],
    "terms are half a step on": [("ByTerms ? 16 * 2", "ByTerms ? 16")],
    "values are read as keys are": [("wg::multiply<T, value_dim, false>", "wg::multiply<T, value_dim, true>")],
    "scores add to those before": [("wg::multiply<T, keys, true, true, false>", "wg::multiply<T, keys, true, true, true>")],
    "registers are not fenced": [("wg::fence();", "")],
    "products are not committed": [("    wg::commit();\n  };\n  const auto add_values", "  };\n  const auto add_values")],
    "old sums are not scaled down": [("o[i] *= factor[i % 4 / 2]", "o[i] *= factor[i % 2]")],
    "weights of two rows change places": [("packed<T>(s[2 * i], s[2 * i + 1])", "packed<T>(s[2 * (i ^ 1)], s[2 * (i ^ 1) + 1])")],
    "every head has keys of its own": [("tile.head / share", "tile.head")],
    "rows behind the last are written": [("if (row < count &&", "if (")],
    "results of four lanes stay where they are": [("        ac::transpose(words);\n", "")],
    "blocks take their second tile alike": [("gridDim.x - 1 - blockIdx.x", "0")],
    "a warpgroup waits for its own turn": [("(group + 1) % groups, 256", "group, 256")],
    "nobody has the first turn": [("  if (group == groups - 1) ac::named_barrier_arrive(first_turn, 256);\n", "")],
}
WINDOWED: dict[str, list[tuple[str, str]]] = {  # the same, of windows, caps, sinks and channels that are missing
    "a window is one key too long": [("behind <= -window", "behind < -window")],
    "a window is one key too short": [("behind <= -window", "behind <= 1 - window")],
    "keys before the window are not masked": [("|| begins_before", "|| false")],
    "blocks before the window are taken": [("max(chunk.start + row - chunk.window + 1, 0) / keys", "0")],
    "a block of the window is left out": [("chunk.window + 1, 0) / keys", "chunk.window + 1 + keys, 0) / keys")],
    "scores are not capped": [(" cap(s, before);", " ;")],
    "scores are capped behind the mask": [
        (" cap(s, before);", " ;"), ("      softmax.take", "      cap(s, before);\n      softmax.take")],
    "the cap's slope is half": [("2.8853900817779268f", "1.4426950408889634f")],
    "a sink is forgotten": [("total += ac::quick_exp2(", "total += 0.0f * ac::quick_exp2(")],
    "a sink of another head": [("sinks[tile.head]", "sinks[0]")],
    "a sink in other units": [("to_float(sinks[tile.head]) * log2_e", "to_float(sinks[tile.head])")],
    "channels behind the last are written": [(" && 8 * (j + lane % 4) < channels", "")],
    "sinks weigh against no score": [("- softmax.most[h] * scale)", ")")],
    "slopes are in other units": [("* log2_e / scale);", "* log2_e);")],
    "slopes of another head": [("slopes[tile.head]", "slopes[0]")],
    "slopes from a row of their own": [("slant(s, block * keys - first_row,", "slant(s, block * keys - first_row + lane / 4,")],
}
CLEAR = Chunk(count=160, start=150, share=2, behind=0, seed=3)


def mutated(pairs: list[tuple[str, str]], form: Form = PLAIN_128) -> StepSource:
    """The kernel of 128 channels with its text, or that of the device library, changed."""
    made = source(DType.F16, form, TWO)
    code, library = made.code, (include_dir() / "agentcompile" / "wgmma.cuh").read_text(encoding="utf-8")
    for old, new in pairs:
        assert old in code or old in library
        code, library = code.replace(old, new), library.replace(old, new)
    return evolve(made, code=code, headers=(*made.headers, ("agentcompile/wgmma.cuh", library)))


@pytest.mark.parametrize("what", some(MUTANTS))
def test_a_wrong_kernel_is_refused_or_wrong(what: str) -> None:
    kernel = mutated(MUTANTS[what])
    for options in (SCHEDULES[0], SCHEDULES[1], SCHEDULES[5]):
        try:
            if attend(kernel, PLAIN_128, TWO, CLEAR, evolve(options, deadline_s=20.0)) > 1.0:
                return
        except EmulationError:
            return
    pytest.fail("nothing saw it")


@pytest.mark.parametrize("what", some(WINDOWED))
def test_a_wrong_kernel_of_windows_is_refused_or_wrong(what: str) -> None:
    """Of those that cap scores and of those with sinks, on whichever of both it shows; blocks in vain cost time alone."""
    for extra in ({"capped": True}, {"sinks": True, "slopes": True}):
        form = evolve(PLAIN_128, windowed=True, **extra)
        kernel = mutated(WINDOWED[what], form)
        try:
            if attend(kernel, form, TWO, evolve(CLEAR, window=70), SCHEDULES[0], missing=32) > 1.0:
                return
        except EmulationError:
            return
    assert what == "blocks before the window are taken"


def test_the_same_without_a_change_is_right() -> None:
    assert [attend(mutated([]), PLAIN_128, TWO, CLEAR, options) <= 1.0 for options in SCHEDULES] == [True] * len(SCHEDULES)
