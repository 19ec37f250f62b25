"""Products of few rows by the kernels of skinny.cu, emulated with every check on: the framework's roundings, and wrong kernels."""

import math
from itertools import product

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.gates import GATES, Gate
from agentcompile_runtime_cuda.skinny_product import GATED, LONG, PLAIN, ROWS, SHORT, SMALL, Schedule, SkinnyProduct, called, source
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import DType, StepSource

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError, LaunchOptions
from agentcompile_validator_emulation.testing import run_called, some

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
HALVES = {DType.F16: torch.float16, DType.BF16: torch.bfloat16}
TINY = Schedule(lines=32, terms=256, warps=4, stages=3)  # many slices of few terms


@frozen(kw_only=True)
class Product:
    """Rows, columns of the result and terms; ``blocks`` share the columns."""

    count: int
    columns: int
    terms: int
    blocks: int = 1
    gated: Gate | None = None
    biased: bool = False
    seed: int = 0


PRODUCTS = st.builds(Product, count=st.integers(1, ROWS), columns=st.integers(1, 130), terms=st.integers(1, 200).map(lambda n: 8 * n),
                     blocks=st.integers(1, 4), gated=st.sampled_from((None, *GATES)), biased=st.booleans(), seed=st.integers(0, 99))


def error(kernel: StepSource, dtype: DType, schedule: Schedule, one: Product, options: LaunchOptions) -> float:
    """Runs the kernel; how far off the worst element is, in what an ulp of each factor leaves open. Raises EmulationError."""
    half, generator = HALVES[dtype], torch.Generator().manual_seed(one.seed)
    x, first, second = (torch.randn(lines, one.terms, generator=generator).div(one.terms**0.25).to(half)
                        for lines in (one.count, one.columns, one.columns))
    bias = torch.randn(one.columns, generator=generator).to(half)
    out = torch.full((one.count, one.columns), math.nan, dtype=half)
    launch = next(launch for launch in kernel.launches if launch.entry.startswith(GATED if one.gated else PLAIN))
    tensors = {"x": x, "out": out, **({"gate": first, "up": second} if one.gated else {"weight": first, "bias": bias})}
    if not one.gated and not one.biased:
        tensors.pop("bias")
        launch = evolve(launch, arguments=tuple(evolve(a, operand="") if a.name == "bias" else a for a in launch.arguments))
    memory = {name: tensor.view(-1) for name, tensor in tensors.items()}
    call = called(launch, schedule, x, first, *([one.gated.number] if one.gated else []))
    run_called(kernel, call, min(one.blocks, one.columns), memory, options)
    eps, left = torch.finfo(half).eps, x.double() @ first.double().T
    if one.gated:
        right = x.double() @ second.double().T
        active = one.gated.run(left.to(half).double()).to(half).double()
        wanted, bound = active * right.to(half).double(), 2 * (active * right).abs() + 2.3 * left.abs() * right.abs()
    else:
        wanted = left + bias.double() if one.biased else left
        bound = wanted.abs() + 0.1
    return float(((out.double() - wanted).abs() / (eps * bound + 1e-4)).nan_to_num(math.inf).max())


KERNELS = {f"{name}, {dtype.value}": (dtype, schedule) for name, schedule in {"short": SHORT, "long": LONG, "tiny": TINY}.items()
           for dtype in HALVES}


@pytest.mark.parametrize("kernel", KERNELS)
@SETTINGS
@given(one=PRODUCTS, order=st.sampled_from(SCHEDULES), seed=st.integers(0, 99))
def test_any_product_is_the_frameworks(kernel: str, one: Product, order: LaunchOptions, seed: int) -> None:
    """Few lines, slices that end early, blocks without a full group, in six orders of threads and copies."""
    dtype, schedule = KERNELS[kernel]
    assert error(source(dtype, schedule), dtype, schedule, one, evolve(order, seed=seed)) <= 1.0


WRONG = {
    "a row too far": ("min(lane / 4, count - 1)", "min(lane / 4 + 1, count - 1)"),
    "lines that do not exist are multiplied": ("inside && Weights::output_of(line) < there", "inside"),
    "terms behind the last": ("const bool inside = at < width;", "const bool inside = true;"),
    "terms in another order": ("{low.x, high.x, low.y, high.y}", "{low.y, high.x, low.x, high.y}"),
    "the second half twice": ("{of_x.z, of_x.w}", "{of_x.x, of_x.y}"),
    "high lines are low ones": ("lines_of_slot + (line + 8) * pitch", "lines_of_slot + line * pitch"),
    "x before it may be read": ("        ac::grid_dependency_wait();\n        for (int before", "        for (int before"),
    "rows of the first slot alone": ("before < early; ++before", "before < 1; ++before"),
    "bytes of x are not awaited": ("(lines / outputs) + count;", "(lines / outputs);"),
    "a slot is free too early": ("ring.wait_full(current);\n        multiply",
                                 "ring.wait_full(current);\n        if (lane == 0) ring.release(current);\n        multiply"),
    "the warps' sums are not awaited": ("      ac::named_barrier_sync(1, multipliers);\n", ""),
    "one place for sums": ("group % 2 * warps", "0 * warps"),
    "gate is up": ("(line % 16 < 8 ? gate : up)", "(line % 16 < 8 ? up : gate)"),
    "lines of gate twice": ("line / 16 * 8 + line % 8;", "line / 16 * 8 + line % 4;"),
    "no bias": ("bias != nullptr ? total", "false ? total"),
    "a bias of another column": ("ac::to_float(bias[column])", "ac::to_float(bias[0])"),
    "a row of the result too far": ("static_cast<long long>(row) * columns + first", "static_cast<long long>(row) * (columns - 1) + first"),
    "the last column is missing": ("if (output >= there) continue;\n        const float",
                                   "if (output + 1 >= there) continue;\n        const float"),
    "columns of the block before": ("begin + each + (block < longer ? 1 : 0)", "begin + each"),
    "the next kernel's x": ("first + output, terms) + from", "first + output, terms)"),
}
CASES = [Product(count=5, columns=75, terms=1112, blocks=2, biased=True), Product(count=8, columns=70, terms=2056, gated=GATES[0]),
         Product(count=2, columns=37, terms=40, blocks=1)]


@pytest.mark.parametrize("name", some(WRONG))
def test_a_wrong_kernel_is_seen(name: str) -> None:
    right, wrong = WRONG[name]
    made = source(DType.F16, LONG)
    assert right in made.code
    kernel = evolve(made, code=made.code.replace(right, wrong))
    for order, one in product(SCHEDULES, CASES):
        try:
            if error(kernel, DType.F16, LONG, one, order) > 1.0:
                return
        except EmulationError:
            return
    pytest.fail("no case and no order tells it from a right one")


@pytest.mark.parametrize("columns", [1, 40, 56])
def test_calls_through_a_backend(columns: int) -> None:
    """As the runtime makes them, with either schedule; and what is refused."""
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    skinny = SkinnyProduct(emulation, lambda: evolve(preset("h200"), sm_count=3))
    x, gate, up = (torch.randn(*size, generator=torch.Generator().manual_seed(1)).to(torch.float16) * 0.5
                   for size in ((1, 3, 24), (columns, 24), (columns, 24)))
    out = torch.full((1, 3, columns), math.nan, dtype=torch.float16)
    for by in GATES:
        skinny.gated(x, gate, up, out.fill_(math.nan), by)
        torch.testing.assert_close(out, by.run(x @ gate.T) * (x @ up.T), rtol=4e-3, atol=1e-3)
    for bias in (None, up[:, 0].contiguous()):
        skinny.plain(x, gate, bias, out)
        torch.testing.assert_close(out, torch.nn.functional.linear(x, gate, bias), rtol=2e-3, atol=1e-3)
    assert skinny.takes(x, gate, up) and skinny.takes(x, gate)
    assert not skinny.takes(x, gate[0]) and not skinny.takes(x, gate[None]) and not skinny.takes(x[0, 0, 0], gate)
    nine, wide = x.repeat(1, 3, 1), torch.zeros(columns, 28, dtype=torch.float16)
    for other in ((nine, gate), (x[:, :0], gate), (x.float(), gate), (x.float(), gate.float()), (x, gate[:0]),
                  (x, gate[:, :16], up[:, :16]), (x, gate, torch.cat((up, up))), (x, gate, up.bfloat16()),
                  (x.mT.contiguous().mT, gate), (wide[None, :1, 4:], wide[:, 4:]), (wide[None, :1], wide)):
        assert not skinny.takes(*other)
    for refused in (lambda: preset("a100"), lambda: None, lambda: evolve(preset("h200"), shared_bytes_per_block=48 << 10)):
        assert not SkinnyProduct(emulation, refused).takes(x, gate)
    small = SkinnyProduct(emulation, lambda: preset("rtx5090"))
    assert small.takes(x, gate)
    small.plain(x, gate, None, out)
    torch.testing.assert_close(out, x @ gate.T, rtol=2e-3, atol=1e-3)


@pytest.mark.compile
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("schedule", [SHORT, LONG, SMALL])
def test_it_builds_without_spilling(dtype: DType, schedule: Schedule) -> None:
    for name in ("h200", "b200", *(["rtx5090"] if schedule is SMALL else [])):
        kernel = CudaBackend().build(source(dtype, schedule), preset(name))
        assert kernel.resources.spill_bytes == 0 and kernel.resources.shared_bytes <= preset(name).shared_bytes_per_block
