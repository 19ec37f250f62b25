"""Attention of prompt chunks by the kernel of attend.cu, emulated with every check on: fp64's numbers, in any layout; and wrong kernels."""

import math

import pytest
import torch
from agentcompile_cuda_kit import include_dir
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.own_attention import THREE, TILES, TWO, OwnAttention, Shape, called, source
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
    seed: int = 0

    def operands(self, dim: int, dtype: torch.dtype) -> tuple[Operands, dict[str, torch.Tensor]]:
        """q, k, v, out [1, H, T, D], and the memory that each lies in: NaN wherever no row of it is."""
        generator = torch.Generator().manual_seed(self.seed)
        heads, rows = self.kv_heads * self.share, self.start + self.count
        sizes = {"q": (self.count, heads), "k": (rows, self.kv_heads), "v": (rows, self.kv_heads), "out": (self.count, heads)}
        memory, made = {}, []
        for name, (count, number) in sizes.items():
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


def exact(operands: Operands, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in fp64, and what its weights make of the values' sizes."""
    q, k, v, _ = operands
    k, v = (one.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    behind = torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    weights = (q.double() @ k.mT * scale).masked_fill(behind, -math.inf).softmax(-1)
    return weights @ v, weights @ v.abs()


def error(operands: Operands, scale: float) -> float:
    """Of the result, in units of what two roundings to 16 bits and fp32 scores leave open; infinite for NaN."""
    wanted, sizes = exact(operands, scale)
    bound = 2.1 * torch.finfo(operands[3].dtype).eps / 2 * sizes + 1e-5
    return float(((operands[3].double() - wanted).abs() / bound).nan_to_num(math.inf).max())


def attend(kernel: StepSource, shape: Shape, chunk: Chunk, options: LaunchOptions, blocks: int = 2) -> float:
    """Runs the kernel on so many blocks, checked; the error. Raises EmulationError."""
    plan = dict(kernel.headers)["plan.cuh"]
    dim, dtype = (128 if "dim = 128" in plan else 64), HALVES[DType.BF16 if "bfloat16" in plan else DType.F16]
    operands, memory = chunk.operands(dim, dtype)
    scale = dim**-0.5
    call = called(kernel.launches[0], operands, shape, scale)
    run_called(kernel, call, min(blocks, int(call[1][TILES])), memory, options)
    found = error(operands, scale)
    operands[3].fill_(math.nan)
    return found if memory["out"].isnan().all() else math.inf  # else it wrote beside its rows


KERNELS = {f"{dim}, {shape.groups} warpgroups, {dtype.value}": (dtype, dim, shape)
           for dim, shape in ((64, TWO), (64, THREE), (128, TWO)) for dtype in HALVES}


@pytest.mark.parametrize("name", KERNELS)
@SETTINGS
@given(data=st.data())
def test_any_chunk_has_fp64s_attention(name: str, data: st.DataObject) -> None:
    """Over one block of keys or several, tiles that are not full, blocks that take several tiles, in six orders of threads and copies."""
    dtype, dim, shape = KERNELS[name]
    chunk, options = data.draw(CHUNKS), evolve(data.draw(st.sampled_from(SCHEDULES)), seed=data.draw(st.integers(0, 99)))
    assert attend(source(dtype, dim, shape), shape, chunk, options, data.draw(st.integers(1, 5))) <= 1.0


EDGES = [(1, 0), (1, 127), (1, 128), (2, 127), (64, 64), (65, 63), (127, 1), (128, 0), (129, 0), (192, 64)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("count, start", EDGES)
def test_edges_of_tiles_and_of_blocks_of_keys(dim: int, count: int, start: int) -> None:
    for options in (SCHEDULES[0], SCHEDULES[1]):
        assert attend(source(DType.F16, dim, TWO), TWO, Chunk(count=count, start=start, behind=0), options) <= 1.0


@pytest.mark.parametrize("dtype", HALVES.values())
def test_calls_through_a_backend(dtype: torch.dtype) -> None:
    """As the runtime makes them: which kernel, how many blocks, whose addresses."""
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    own = OwnAttention(emulation, lambda: evolve(preset("h200"), sm_count=3))
    for dim, chunk, shape in ((64, Chunk(count=150, start=75, share=3), None), (64, Chunk(count=200, start=9), THREE),
                              (128, Chunk(count=140, start=0, kv_heads=2, by_head=True), None)):
        operands, _ = chunk.operands(dim, dtype)
        assert own.takes(operands, 0.1)
        own(operands, 0.1, shape)
        assert error(operands, 0.1) <= 1.0


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
    run_called(kernel, called(kernel.launches[0], operands, TWO, 64**-0.5), 1, memory, SCHEDULES[0])
    return error(operands, 64**-0.5)


def test_keys_that_are_long_ago_weigh_what_they_did() -> None:
    """A product and a difference that a compiler fuses are not 0 where both are equal: the host compiles them apart, a GPU does not."""
    made = source(DType.F16, 64, TWO)
    assert UNCHANGED in made.code
    right, fused = drift(made), drift(evolve(made, code=made.code.replace(UNCHANGED, "ac::quick_exp2(fmaf(most[h], scale, -shift))")))
    assert right <= 0.02 < 0.2 <= fused


RELEASE_QUERIES, WAIT_FOR_QUERIES = "    release(q_free);\n", "    ac::mbarrier_wait(q_full, round % 2);\n"
ADD_VALUES, RELEASE_VALUES = "      add_values(o, weights, v_turn.stage);\n", "      release(v_free + v_turn.stage);\n"
MUTANTS: dict[str, list[tuple[str, str]]] = {  # what is wrong; texts, and with what they are replaced
    "the mask lets one key too many in": [("> 8 * h) s[i]", "> 8 * h + 1) s[i]")],
    "the mask leaves the last key out": [("> 8 * h) s[i]", ">= 8 * h) s[i]")],
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
        ("(k_full + turn.stage, block_elements * sizeof(T))", "(k_full + turn.stage, block_elements / panels * sizeof(T))")],
    "panels of queries lie closer": [("p * (rows * 128 / 16)", "p * (rows * 64 / 16)")],
    "panels of keys lie closer": [("p * (keys * 128 / 16)", "p * (64 * 128 / 16)")],
    "the second half of the values is the first": [("part * (panels * panel_elements * 2 / 16)", "part * 0")],
    "values are fetched from the first half": [("block * keys + part * wg::panel_spans", "block * keys")],
    "panels of values lie apart": [("panels = panel_spans * 128 / 16", "panels = 2 * panel_spans * 128 / 16")],
    "groups of spans lie apart": [("eight_spans / 16", "2 * eight_spans / 16")],
    "terms are half a step on": [("ByTerms ? 16 * 2", "ByTerms ? 16")],
    "values are read as keys are": [("wg::multiply<T, dim, false>", "wg::multiply<T, dim, true>")],
    "scores add to those before": [("wg::multiply<T, keys, true, true, false>", "wg::multiply<T, keys, true, true, true>")],
    "registers are not fenced": [("wg::fence();", "")],
    "products are not committed": [("    wg::commit();\n  };\n  const auto add_values", "  };\n  const auto add_values")],
    "old sums are not scaled down": [("o[i] *= factor[i % 4 / 2]", "o[i] *= factor[i % 2]")],
    "weights of two rows change places": [("packed(s[2 * i], s[2 * i + 1])", "packed(s[2 * (i ^ 1)], s[2 * (i ^ 1) + 1])")],
    "every head has keys of its own": [("tile.head / share", "tile.head")],
    "rows behind the last are written": [("if (row < count)", "if (true)")],
    "results of four lanes stay where they are": [("        wg::transpose(words);\n", "")],
    "blocks take their second tile alike": [("gridDim.x - 1 - blockIdx.x", "0")],
    "a warpgroup waits for its own turn": [("(group + 1) % groups, 256", "group, 256")],
    "nobody has the first turn": [("  if (group == groups - 1) wg::named_barrier_arrive(first_turn, 256);\n", "")],
}
CLEAR = Chunk(count=160, start=150, share=2, behind=0, seed=3)


def mutated(pairs: list[tuple[str, str]]) -> StepSource:
    """The kernel of 128 channels with its text, or that of the device library, changed."""
    made = source(DType.F16, 128, TWO)
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
            if attend(kernel, TWO, CLEAR, evolve(options, deadline_s=20.0)) > 1.0:
                return
        except EmulationError:
            return
    pytest.fail("nothing saw it")


def test_the_same_without_a_change_is_right() -> None:
    assert [attend(mutated([]), TWO, CLEAR, options) <= 1.0 for options in SCHEDULES] == [True] * len(SCHEDULES)
