"""Products by chosen experts through the kernels of expert_rows.cu, emulated with every check on; and wrong kernels."""

import math
from itertools import product

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.expert_product import LOW, TALL, THREADS, Call, ExpertProduct, Height, one_by_one, source
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.experts import expert_linear
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import DType, StepSource

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError, LaunchOptions
from agentcompile_validator_emulation.testing import run_called, some

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
HALVES = {DType.F16: torch.float16, DType.BF16: torch.bfloat16}
KERNELS = list(product((LOW, TALL), (False, True)))


@frozen(kw_only=True)
class Rows:
    """Tokens with ``slots`` choices each of ``experts``; ``likely``: of how many nearly all choices are; ``blocks`` that stay."""

    tokens: int
    slots: int
    experts: int
    columns: int
    terms: int
    likely: int = 0
    shared: bool = True
    biased: bool = False
    blocks: int = 2
    seed: int = 0

    def drawn(self, half: torch.dtype, transposed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """x, weight, choices and bias."""
        generator = torch.Generator().manual_seed(self.seed)
        odds = torch.ones(self.tokens, self.experts)
        odds[:, self.likely or self.experts:] = 1e-3
        chosen = torch.multinomial(odds, self.slots, generator=generator)
        lines = (self.terms, self.columns) if transposed else (self.columns, self.terms)
        x, weight, bias = (torch.randn(*size, generator=generator).div(scale).to(half) for size, scale in (
            ((self.tokens, 1 if self.shared else self.slots, self.terms), 1.0), ((self.experts, *lines), self.terms**0.5),
            ((self.experts, self.columns), 1.0)))
        return x, weight, chosen, bias if self.biased else None


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    """Few and many tokens, experts that nobody and that everybody chooses, slices and tiles that end early."""
    experts = draw(st.integers(1, 12))
    return Rows(tokens=draw(st.integers(1, 90)), slots=draw(st.integers(1, min(4, experts))), experts=experts,
                columns=8 * draw(st.integers(1, 40)), terms=8 * draw(st.integers(1, 60)), likely=draw(st.integers(0, experts)),
                shared=draw(st.booleans()), biased=draw(st.booleans()), blocks=draw(st.integers(1, 4)), seed=draw(st.integers(0, 99)))


def error(kernel: StepSource, one: Rows, height: Height, transposed: bool, options: LaunchOptions) -> float:
    """Runs both kernels; how far off the worst element is, in units in the last place and what sums leave open. Raises EmulationError."""
    half = HALVES[DType(str(kernel.launches[1].arguments[0].dtype.value))]
    x, weight, chosen, bias = one.drawn(half, transposed)
    call = evolve(Call.of(x, weight, chosen, transposed), height=height)
    deal, products = call.launches(kernel.launches, transposed)
    dealt = torch.full((call.deal_words,), -1, dtype=torch.int32)
    out = torch.full((*chosen.shape, one.columns), math.nan, dtype=half)
    given_bias = torch.zeros(one.experts * one.columns, dtype=half) if bias is None else bias.view(-1)
    memory = {"x": x.view(-1), "weight": weight.view(-1), "bias": given_bias, "chosen": chosen.view(-1), "deal": dealt, "out": out.view(-1)}
    run_called(kernel, deal, 1, memory, options)
    run_called(kernel, products, min(one.blocks, call.blocks), memory, options)
    matrices, each = (weight.mT if transposed else weight).double(), x.double().expand(*chosen.shape, -1)
    wanted = torch.empty(*chosen.shape, one.columns, dtype=torch.float64)
    for expert in chosen.unique():
        wanted[chosen == expert] = each[chosen == expert] @ matrices[expert].mT
    wanted = wanted if bias is None else wanted + bias.double()[chosen]
    apart = (out.double() - wanted).abs() / (torch.finfo(half).eps * wanted.abs() + 1e-4)
    return float(apart.nan_to_num(math.inf).max())


@pytest.mark.parametrize(("height", "transposed"), KERNELS)
@pytest.mark.parametrize("dtype", HALVES)
@SETTINGS
@given(one=rows(), order=st.sampled_from(SCHEDULES), seed=st.integers(0, 99))
def test_any_choice_is_multiplied_by_its_expert(dtype: DType, height: Height, transposed: bool, one: Rows, order: LaunchOptions,
                                                seed: int) -> None:
    assert error(source(dtype, height, transposed), one, height, transposed, evolve(order, seed=seed)) <= 1.0


def test_experts_of_several_tiles() -> None:
    one = Rows(tokens=300, slots=1, experts=3, columns=264, terms=72, likely=1, blocks=3)
    for height, transposed in KERNELS:
        assert error(source(DType.F16, height, transposed), one, height, transposed, SCHEDULES[0]) <= 1.0


WRONG = {
    "rows are not fenced for the products": ("      wg::proxy_fence();\n", ""),
    "a copy is announced before it is waited for": ("ac::cp_async_wait<behind>();", ""),
    "the last copies are not waited for": ("ac::cp_async_wait<0>();", ""),
    "one slice fewer is waited for": ("ac::cp_async_wait<behind>();", "ac::cp_async_wait<behind + 1>();"),
    "rows of the expert before": ("dealt.order()[tile.first + min(line", "dealt.order()[max(tile.first - 1, 0) + min(line"),
    "the matrix of the first expert": ("slice * depth, tile.column, tile.expert, 0,", "slice * depth, tile.column, 0, 0,"),
    "a row that is shared is not": ("pair / share", "pair"),
    "terms behind the last are what lies there": ("inside = slice * depth + at * vector < terms;", "inside = true;"),
    "another swizzle": ("(at ^ line % 8) * vector", "(at ^ line % 4) * vector"),
    "a place is free before its products are done": ("wg::wait<1>();\n        if (slice > 0) release(before);", "release(turn.stage);"),
    "the last products are not waited for": ("wg::wait<0>();\n      wg::settle(sums);", "wg::settle(sums);"),
    "results of the row before": ("tile.first + row] : -1", "tile.first + max(row - 1, 0)] : -1"),
    "rows of the next expert are stored": ("row < tile.count ? dealt", "row <= tile.count ? dealt"),
    "columns behind the last": ("pairs[h] >= 0 && first < columns", "pairs[h] >= 0"),
    "the bias of the first expert": ("bias + static_cast<long long>(tile.expert) * columns", "bias"),
    "more registers than there are": ("copier_registers>();", "copier_registers + 8>();"),
    "bands overlap": ("inside % high * rows;", "inside % high * (rows - 1);"),
    "the last band is missing": ("(choices + rows - 1) / rows", "choices / rows"),
    "columns of the band's number": ("inside / high * columns_of_tile", "inside % high * columns_of_tile"),
    "a band of the expert before": ("first, count, first_band)", "first, count, max(first_band - 1, 0))"),
    "choices before all are counted": ("  __syncthreads();\n  const int count", "  const int count"),
    "an order that starts at the first place": ("counts[expert] = first;", "counts[expert] = 0;"),
}
CASES = [Rows(tokens=150, slots=2, experts=5, columns=272, terms=200, likely=2, biased=True, blocks=2),
         Rows(tokens=40, slots=3, experts=9, columns=264, terms=328, shared=False, blocks=3, seed=2)]


@pytest.mark.parametrize("name", some(WRONG))
def test_a_wrong_kernel_is_seen(name: str) -> None:
    right, wrong = WRONG[name]
    made = source(DType.F16)
    assert made.code.count(right) == 1
    kernel = evolve(made, code=made.code.replace(right, wrong))
    for order, one in product(SCHEDULES, CASES):
        try:
            if error(kernel, one, LOW, False, order) > 1.0:
                return
        except EmulationError:
            return
    pytest.fail("no case and no order tells it from a right one")


@pytest.mark.parametrize("sms", [1, 3])
def test_calls_through_a_backend(sms: int) -> None:
    """As the runtime makes them: how many blocks, whose addresses; and what is refused."""
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    experts = ExpertProduct(emulation, lambda: evolve(preset("h200"), sm_count=sms))
    one = Rows(tokens=150, slots=2, experts=4, columns=136, terms=24, biased=True, seed=sms)
    x, weight, chosen, bias = one.drawn(torch.float16, False)
    assert bias is not None and experts.takes(x, weight, chosen, bias, False)
    assert experts.is_tall(chosen, weight) and not experts.is_tall(chosen[:90], weight)
    experts.expect()
    experts.start(x)
    for count in (150, 90, 1):
        out = torch.full((count, 2, 136), math.nan, dtype=torch.float16)
        experts(x[:count], weight, chosen[:count], bias, False, out)
        torch.testing.assert_close(out, expert_linear(x[:count], weight, chosen[:count], bias), rtol=4e-3, atol=1e-3)
        torch.testing.assert_close(out, one_by_one(x[:count], weight, chosen[:count], bias, False), rtol=4e-3, atol=1e-3)
    for other in ((x.float(), weight, chosen, bias), (x[:, :, :20], weight[:, :, :20], chosen, bias), (x, weight[:, :100], chosen, None),
                  (x, weight, chosen.int(), bias), (x, weight, chosen, bias[:, :128]), (x, weight.float(), chosen, None),
                  (x[:100], weight, chosen, bias), (x, weight, chosen[:0], bias), (x.expand(150, 3, 24), weight, chosen, bias),
                  (x, weight[:, :, ::2], chosen, bias), (x, weight, chosen.mT.contiguous().mT, bias)):
        assert not experts.takes(*other, False)


@pytest.mark.compile
@pytest.mark.parametrize(("height", "transposed"), KERNELS)
def test_it_builds_without_spilling(height: Height, transposed: bool) -> None:
    for dtype in HALVES if not transposed else (DType.F16,):
        kernel = CudaBackend().build(source(dtype, height, transposed), preset("h200"))
        assert kernel.resources.spill_bytes == 0 and kernel.resources.registers * THREADS <= 65536
