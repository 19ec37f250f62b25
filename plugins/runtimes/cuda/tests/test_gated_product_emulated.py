"""Gate and up as one product by the kernel of gated.cu, emulated with every check on: the framework's roundings, and wrong kernels."""

import math
from itertools import product

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.gated_product import CLUSTERS, THREADS, GatedProduct, called, source
from agentcompile_runtime_cuda.gates import GATES, Gate
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import DType, StepSource

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError, LaunchOptions
from agentcompile_validator_emulation.testing import run_called, some

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=10, suppress_health_check=list(HealthCheck))
HALVES = {DType.F16: torch.float16, DType.BF16: torch.bfloat16}


@frozen(kw_only=True)
class Product:
    """Rows, columns of either factor and terms; ``clusters``: of blocks that stay."""

    count: int
    columns: int
    terms: int
    clusters: int = 1
    seed: int = 0


PRODUCTS = st.builds(Product, count=st.integers(1, 600), columns=st.integers(1, 36).map(lambda n: 8 * n),
                     terms=st.integers(1, 40).map(lambda n: 8 * n), clusters=st.integers(1, 3), seed=st.integers(0, 99))


def error(kernel: StepSource, dtype: DType, one: Product, options: LaunchOptions, gate_: Gate = GATES[0]) -> float:
    """Runs the kernel; how far off the worst element is, in what an ulp of gate, up and the result leave open. Raises EmulationError."""
    half, generator = HALVES[dtype], torch.Generator().manual_seed(one.seed)
    x, gate, up = (torch.randn(lines, one.terms, generator=generator).div(one.terms**0.25).to(half)
                   for lines in (one.count, one.columns, one.columns))
    out = torch.full((one.count, one.columns), math.nan, dtype=half)
    call = called(kernel.launches[0], x, gate, up)
    memory = {"x": x.view(-1), "gate": gate.view(-1), "up": up.view(-1), "out": out.view(-1)}
    run_called(kernel, call, 2 * min(one.clusters, call[1][CLUSTERS]), memory, options)
    left, right = (x.double() @ weight.double().T for weight in (gate, up))
    active = gate_.run(left.to(half).double()).to(half).double()
    eps = torch.finfo(half).eps
    bound = eps * (2 * (active * right).abs() + 2.3 * left.abs() * right.abs()) + 1e-4  # activations change at most 1.13 times as fast
    return float(((out.double() - active * right.to(half).double()).abs() / bound).nan_to_num(math.inf).max())


@pytest.mark.parametrize("dtype", HALVES)
@SETTINGS
@given(one=PRODUCTS, order=st.sampled_from(SCHEDULES), seed=st.integers(0, 99), gate=st.sampled_from(GATES))
def test_any_product_is_the_frameworks(dtype: DType, one: Product, order: LaunchOptions, seed: int, gate: Gate) -> None:
    """Tiles that are not full, slices that end early, clusters that take several tiles, in six orders of threads and copies."""
    assert error(source(dtype, gate), dtype, one, evolve(order, seed=seed), gate) <= 1.0


WRONG = {
    "up is gate": ("rank == 0 ? gate : up, slice", "gate, slice"),
    "gate and up in each other's place": ("gated(of_gate[0], of_up[0]), gated(of_gate[1], of_up[1])",
                                          "gated(of_up[0], of_gate[0]), gated(of_up[1], of_gate[1])"),
    "a column of up too far": ("of_gate + columns_of_tile / 2", "of_gate + columns_of_tile / 2 + 1"),
    "rows of the other block": ("tile.row + rank * rows, 0", "tile.row, 0"),
    "a place is free before its products are done": ("wg::wait<1>();\n        if (slice > 0) release(before);", "release(turn.stage);"),
    "the last products are not waited for": ("wg::wait<0>();\n      wg::settle(sums);", "wg::settle(sums);"),
    "a parity that does not turn": ("full + turn.stage, turn.parity)", "full + turn.stage, 0)"),
    "terms of the slice before": ("wg::fetch<1>(place, x, slice * depth,", "wg::fetch<1>(place, x, max(slice - 1, 0) * depth,"),
    "one block says for both what it has read": ("if (lane < cluster) wg::arrive", "if (lane < 1) wg::arrive"),
    "the last block of rows is missing": ("row < count && column", "row + 1 < count && column"),
    "every band is the first": ("const int first = number / width *", "const int first = 0 *"),
    "the last band is as high as the others": ("tiles_down - first)", "tiles_down)"),
    "columns behind the last": ("row < count && column < columns", "row < count"),
}
MANY = Product(count=2600, columns=136, terms=8, clusters=3)  # rows of more than one band
CASES = [Product(count=300, columns=264, terms=360, clusters=1), Product(count=257, columns=136, terms=200, clusters=2), MANY]


def test_rows_of_several_bands() -> None:
    for order in SCHEDULES[:2]:
        assert error(source(DType.F16), DType.F16, MANY, order) <= 1.0


@pytest.mark.parametrize("sms", [1, 3, 8])
def test_calls_through_a_backend(sms: int) -> None:
    """As the runtime makes them: how many clusters, whose addresses; and what is refused."""
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    gated = GatedProduct(emulation, lambda: evolve(preset("h200"), sm_count=sms))
    x, gate, up = (torch.randn(*size, generator=torch.Generator().manual_seed(sms)).to(torch.float16) * 0.5
                   for size in ((1, 1040, 24), (136, 24), (136, 24)))
    assert gated.takes(x, gate, up)
    out = torch.full((1, 1040, 136), math.nan, dtype=torch.float16)
    for by in (GATES[sms % len(GATES)], GATES[0]):
        gated.expect(by)
        gated.start(x)
        gated(x, gate, up, out.fill_(math.nan), by)
        torch.testing.assert_close(out, by.run(x @ gate.T) * (x @ up.T), rtol=4e-3, atol=1e-3)
    for other in ((x[:, :100], gate, up), (x.float(), gate, up), (x, gate[:100], up), (x, gate[:, :16], up[:, :16]), (x, gate[:0], up[:0]),
                  (x.mT.contiguous().mT, gate, up)):
        assert not gated.takes(*other)


@pytest.mark.parametrize("name", some(WRONG))
def test_a_wrong_kernel_is_seen(name: str) -> None:
    right, wrong = WRONG[name]
    made = source(DType.F16)
    assert right in made.code
    kernel = evolve(made, code=made.code.replace(right, wrong))
    for order, one in product(SCHEDULES, CASES):
        try:
            if error(kernel, DType.F16, one, order) > 1.0:
                return
        except EmulationError:
            return
    pytest.fail("no case and no order tells it from a right one")


@pytest.mark.compile
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_it_builds_without_spilling(gate: Gate) -> None:
    for dtype in HALVES if gate is GATES[0] else (DType.F16,):
        kernel = CudaBackend().build(source(dtype, gate), preset("h200"))
        assert kernel.resources.spill_bytes == 0 and kernel.resources.registers * THREADS <= 65536
