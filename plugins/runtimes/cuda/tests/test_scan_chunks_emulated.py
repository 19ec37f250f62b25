"""Scans through the kernels of scan_chunks.cu, emulated with every check on, beside the operator in fp64; and wrong kernels."""

import math
from itertools import product

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_runtime_cuda.compared import CLOSE_RECURRENCES
from agentcompile_runtime_cuda.recurrent_rows import Kind
from agentcompile_runtime_cuda.scan_chunks import FEWEST_TOKENS, PIECES_OF_X, SCHEDULES, ChunkSchedule, Scan, ScanChunks, schedule_for, source
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.recurrence import recurrence
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import DType, RecurrenceCall

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES as ORDERS
from agentcompile_validator_emulation.module import EmulationError, LaunchOptions
from agentcompile_validator_emulation.testing import run_called, some

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
TYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}
TARGET = preset("h200")
EPS = torch.finfo(torch.float32).eps
CLOSE = 24.0  # units in the last place of the largest element, a twentieth of what a comparison on a device allows
BY_CHUNK = [ChunkSchedule(chunk=16, rows=16, warps=1), ChunkSchedule(chunk=32, rows=16, warps=2), ChunkSchedule(chunk=32, rows=32, warps=4),
            ChunkSchedule(chunk=64, rows=16, warps=4), ChunkSchedule(chunk=64, rows=32, warps=8), *SCHEDULES]


@frozen(kw_only=True)
class Drawn:
    """Sizes of one scan, what it is given, how strongly it decays and how its kernels work."""

    tokens: int
    schedule: ChunkSchedule
    groups: int = 1
    heads: int = 1  # of a group
    width: int = 16
    terms: int = 16
    rated: bool = False
    begins: str = "state"  # or "turned", "nothing"
    by_token: bool = False
    valid: int | None = None
    skips: bool = False
    scaled: bool = False
    dtype: torch.dtype = torch.bfloat16
    keys_of: torch.dtype = torch.bfloat16  # what keys and queries were before
    decays: float = 1.0  # of their size
    growing: bool = False
    seed: int = 0

    @property
    def kind(self) -> Kind:
        """That of the call."""
        return Kind(terms=self.terms, rows_of_head=self.width, rows_of_group=self.heads * self.width, rates_each=int(self.rated),
                    is_scaled=self.scaled)

    @property
    def fits(self) -> bool:
        """Whether there are such kernels."""
        return self.schedule.fits(self.kind, PIECES_OF_X[TYPES[self.dtype]], TARGET)

    def call(self) -> RecurrenceCall:
        """With normal numbers."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = self.groups * self.heads

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        def rows(*size: int) -> torch.Tensor:
            return drawn(*size[:1], *size[2:], size[1]).movedim(-1, 1) if self.by_token else drawn(*size)

        decay = rows(1, self.tokens, heads).abs() * self.decays
        if heads > 1:
            decay = decay * torch.logspace(-3, 0, heads)  # weak and strong ones beside each other
        decay = decay if self.rated or self.growing else -decay
        state = drawn(1, heads, self.terms, self.width).mT if self.begins == "turned" else drawn(1, heads, self.width, self.terms)
        keys, queries = ((drawn(1, self.tokens, self.groups, self.terms) / self.terms**0.5).to(self.keys_of).float() for _ in range(2))
        x = rows(1, self.tokens, heads, self.width).to(self.dtype)
        return RecurrenceCall(None if self.begins == "nothing" else state, decay, x if self.dtype is not torch.bfloat16 else x.contiguous(),
                              keys, queries, -drawn(heads, 1).abs() if self.rated else None, None,
                              None if self.valid is None else torch.tensor([self.valid]), drawn(heads) if self.skips else None, self.scaled)


@st.composite
def scans(draw: st.DrawFn) -> Drawn:
    """Few and many tokens beside chunks; only sizes that have kernels."""
    tokens = draw(st.one_of(st.integers(1, 33), st.integers(1, 150)))
    one = Drawn(tokens=tokens, schedule=draw(st.sampled_from(BY_CHUNK)), groups=draw(st.integers(1, 2)), heads=draw(st.integers(1, 2)),
                width=draw(st.sampled_from([16, 32, 48, 64])), terms=draw(st.sampled_from([16, 32, 64, 128])), rated=draw(st.booleans()),
                begins=draw(st.sampled_from(["state", "turned", "nothing"])), by_token=draw(st.booleans()),
                valid=draw(st.one_of(st.none(), st.integers(-1, tokens + 3))), skips=draw(st.booleans()), scaled=draw(st.booleans()),
                dtype=draw(st.sampled_from([torch.bfloat16, *TYPES])), keys_of=draw(st.sampled_from(list(TYPES))),
                decays=draw(st.sampled_from([0.01, 1.0, 30.0])), seed=draw(st.integers(0, 99)))
    return one if one.fits else evolve(one, schedule=BY_CHUNK[0], width=16)


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory from its first element on."""
    return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def errors(one: Drawn, options: LaunchOptions, right: str = "", wrong: str = "") -> tuple[float, float]:
    """How far the worst element of y and of the last state is off, in units in the last place of the largest. Raises EmulationError."""
    call = one.call()
    made = source(TYPES[one.dtype], one.kind, one.schedule)
    if right:
        texts = [made.code, *(text for _, text in made.headers)]
        assert sum(text.count(right) for text in texts) == 1, right
        made = evolve(made, code=made.code.replace(right, wrong), headers=tuple((n, text.replace(right, wrong)) for n, text in made.headers))
    out = torch.full(call.x.shape, math.nan), call.new_state().fill_(math.nan)
    scan = Scan.of(call, out, one.schedule)
    for index, launch in enumerate(made.launches):
        names = [argument.name for argument in launch.arguments if argument.addressed]
        memory = {name: stored(tensor) for name, tensor in zip(names, scan.of_launch(index), strict=True) if tensor is not None}
        launch = evolve(launch, arguments=tuple(evolve(argument, operand="") if argument.addressed and argument.name not in memory else argument
                                                for argument in launch.arguments))
        run_called(made, (launch, scan.scalars[index]), scan.blocks[index], memory, options)
    exact = evolve(call, **{name: None if given is None else given.double() for name, given in (
        ("state", call.state), ("decay", call.decay), ("x", call.x), ("keys", call.keys), ("queries", call.queries), ("rates", call.rates),
        ("skip", call.skip))})
    wanted = recurrence(exact.state, exact.decay, exact.x, exact.keys, exact.queries, exact.rates, None, exact.valid, exact.skip, exact.scaled)
    found = [float((mine.double() - theirs).abs().nan_to_num(math.inf).max() / theirs.abs().max().clamp_min(1e-30)) / EPS
             for mine, theirs in zip(out, wanted, strict=True)]
    return found[0], found[1]


@SETTINGS
@given(one=scans(), order=st.sampled_from(ORDERS), seed=st.integers(0, 99))
def test_any_scan_is_that_of_the_operator(one: Drawn, order: LaunchOptions, seed: int) -> None:
    assert max(errors(one, evolve(order, seed=seed))) <= CLOSE < CLOSE_RECURRENCES
