"""Short convolutions through the kernel of short_convolution.cu, emulated with every check on; and wrong kernels."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.short_convolution import RUN, THREADS, ShortConvolution, blocks, source
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.convolution import causal_convolution
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import Access, DType

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError, LaunchOptions
from agentcompile_validator_emulation.testing import run_called, some

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=24, suppress_health_check=list(HealthCheck))
TYPES = {torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32}


@frozen(kw_only=True)
class Drawn:
    """Sizes of one convolution; ``beside``: channels of others between the tokens of x."""

    tokens: int
    vectors: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    beside: int = 0
    biased: bool = True
    silu: bool = True
    valid: int | None = None
    seed: int = 0
    in_place: bool = False  # the last columns over the state, which one thread's run of tokens allows

    def operands(self) -> tuple[Any, ...]:
        """In the operator's order."""
        generator, lanes = torch.Generator().manual_seed(self.seed), 16 // self.dtype.itemsize
        channels = lanes * self.vectors

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        x = drawn(1, self.tokens, channels + lanes * self.beside)[..., :channels].transpose(1, 2)
        return (drawn(1, channels, self.width), x, drawn(channels, self.width), drawn(channels) if self.biased else None,
                None if self.valid is None else torch.tensor([self.valid]), self.silu)


@st.composite
def convolutions(draw: st.DrawFn) -> Drawn:
    """Few and many tokens beside a thread's run, states that reach over all of them, and channels that end within a block."""
    tokens = draw(st.integers(1, 40))
    return Drawn(in_place=tokens <= RUN and draw(st.booleans()),
                 tokens=tokens, vectors=draw(st.integers(1, 40)), width=draw(st.integers(1, 8)), dtype=draw(st.sampled_from(list(TYPES))),
                 beside=draw(st.integers(0, 2)), biased=draw(st.booleans()), silu=draw(st.booleans()),
                 valid=draw(st.one_of(st.none(), st.integers(-1, tokens + 2))), seed=draw(st.integers(0, 99)))


def error(one: Drawn, options: LaunchOptions, right: str = "", wrong: str = "") -> float:
    """How far off the worst element is, in units in the last place and what sums leave open. Raises EmulationError."""
    state, x, weight, bias, valid, silu = one.operands()
    made = source(TYPES[one.dtype], one.width, silu)
    if right:
        assert made.code.count(right) == 1, right
        made = evolve(made, code=made.code.replace(right, wrong))
    channels = x.shape[1]
    memory = {"state": state.view(-1), "x": torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0),
              "weight": weight.view(-1), "out": torch.full((one.tokens * channels,), math.nan, dtype=one.dtype),
              "last": torch.full((channels * one.width,), math.nan, dtype=one.dtype)}
    if one.in_place:
        memory["last"] = memory["state"] = state.clone().view(-1)
    memory |= {name: given_tensor for name, given_tensor in (("bias", bias), ("valid", valid)) if given_tensor is not None}
    launch = made.launches[0]
    launch = evolve(launch, arguments=tuple(evolve(a, operand="") if a.operand in ("bias", "valid") and a.operand not in memory else a
                                            for a in launch.arguments))
    if one.in_place:
        launch = evolve(launch, arguments=tuple(
            evolve(a, operand="state", access=Access.READ_WRITE) if a.operand in ("state", "last") else a for a in launch.arguments))
    run_called(made, (launch, (one.tokens, channels, x.stride(2))), blocks(one.tokens, channels, x.element_size()), memory, options)
    clipped = None if valid is None else valid.clamp(0, one.tokens)
    wanted, last = causal_convolution(state.double(), x.double(), weight.double(), None if bias is None else bias.double(), clipped)
    wanted = torch.nn.functional.silu(wanted.to(one.dtype)).double() if silu else wanted
    found = memory["out"].view(1, one.tokens, channels).transpose(1, 2)
    apart = (found.double() - wanted).abs() / (2 * torch.finfo(one.dtype).eps * (wanted.abs() + 1.0) + 1e-5)
    same = torch.equal(memory["last"].view_as(last).double(), last)
    return float(apart.nan_to_num(math.inf).max()) if same else math.inf


@SETTINGS
@given(one=convolutions(), order=st.sampled_from(SCHEDULES), seed=st.integers(0, 99))
def test_any_convolution_is_that_of_the_operator(one: Drawn, order: LaunchOptions, seed: int) -> None:
    assert error(one, evolve(order, seed=seed)) <= 1.0


WRONG = {
    "a window one token late": ("column(first + k - width, window[k]);", "column(first + k - width - (first > 0), window[k]);"),
    "the first column of the state": ("* width + width + token]", "* width + max(width + token - 1, 0)]"),
    "weights from behind": ("* width + k]);\n  }", "* width + width - 1 - k]);\n  }"),
    "the last columns with padding": ("min(static_cast<long long>(tokens), valid[0])", "static_cast<long long>(tokens)"),
    "a bias of the first channels": ("Vector::load(bias + channel)", "Vector::load(bias)"),
    "the last columns from behind": ("for (int k = 0; k < width; ++k) {\n      float kept",
                                     "for (int k = width - 1; k >= 0; --k) {\n      float kept"),
    "no activation": ("return ac::silu(ac::round_to<T>(x));", "return ac::round_to<T>(x);"),
    "the token before": ("column(token, window[width - 1]);", "column(max(token - 1, 0), window[width - 1]);"),
    "tokens behind the last": ("min(first + run, tokens)", "first + run"),
    "channels of all tokens": ("static_cast<long long>(token) * x_token", "static_cast<long long>(token) * channels"),
}
CASES = [Drawn(tokens=37, vectors=5, width=4, beside=1, valid=33), Drawn(tokens=20, vectors=3, width=3, dtype=torch.float32, valid=2)]
STEP = Drawn(tokens=1, vectors=2, width=4, in_place=True)


@pytest.mark.parametrize("name", some(WRONG))
def test_a_wrong_kernel_is_seen(name: str) -> None:
    for one, order in product((*CASES, STEP), SCHEDULES):
        try:
            if error(one, order, *WRONG[name]) > 1.0:
                return
        except EmulationError:
            return
    pytest.fail("no case and no order tells it from a right one")


@pytest.mark.parametrize("one", CASES)
def test_calls_through_a_backend(one: Drawn) -> None:
    """As the runtime makes them: how many blocks, whose addresses; and what is refused."""
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    kernels = ShortConvolution(emulation, lambda: preset("h200"))
    state, x, weight, bias, valid, silu = one.operands()
    assert kernels.takes(state, x, weight, bias)
    out = torch.full((1, one.tokens, x.shape[1]), math.nan, dtype=one.dtype), torch.full_like(state, math.nan)
    kernels(state, x, weight, bias, valid, silu, out)
    wanted, last = causal_convolution(state, x, weight, bias, valid, silu)
    torch.testing.assert_close(out[0].transpose(1, 2), wanted, rtol=4 * torch.finfo(one.dtype).eps, atol=4 * torch.finfo(one.dtype).eps)
    assert torch.equal(out[1], last)
    wide = torch.randn(x.shape[1], 9).to(one.dtype)
    for other in ((state, x.contiguous(), weight, bias), (state, x, wide, bias), (state.double(), x, weight, bias),
                  (state, x[:, 1:], weight[1:], bias), (state, x, weight, bias.double())):
        assert not kernels.takes(*other)


@pytest.mark.compile
@pytest.mark.parametrize("dtype", TYPES.values())
def test_it_builds_without_spilling(dtype: DType) -> None:
    kernel = CudaBackend().build(source(dtype, 4, True), preset("h200"))
    assert kernel.resources.spill_bytes == 0 and kernel.resources.registers * THREADS <= 65536
