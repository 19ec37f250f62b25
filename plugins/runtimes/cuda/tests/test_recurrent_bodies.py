"""Which kernels serve a recurrence: chunks where they take it and agree with the operator, else the one that goes token by token."""

from unittest.mock import patch

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_runtime_cuda.compared import Compared
from agentcompile_runtime_cuda.recurrent_bodies import RecurrentBodies
from agentcompile_runtime_cuda.recurrent_rows import RecurrentRows
from agentcompile_runtime_cuda.scan_chunks import ScanChunks
from agentcompile_runtime_cuda.short_convolution import ShortConvolution

from agentcompile_core.ops import operators as operators  # registers the operators of namespace agentcompile
from agentcompile_core.ops.recurrence import recurrence
from agentcompile_core.plugin.discovery import load_catalog

pytest.importorskip("agentcompile_validator_emulation")


@pytest.mark.parametrize(("tokens", "terms", "is_delta", "is_wrong", "served"), [
    (80, 32, False, False, {"ScanChunks": True}), (80, 32, True, False, {"RecurrentRows": True}),
    (9, 32, False, False, {"RecurrentRows": True}), (80, 96, False, False, {"RecurrentRows": True}),
    (80, 32, False, True, {"ScanChunks": False, "RecurrentRows": True}),
    (80, 64, False, True, {"ScanChunks": False, "RecurrentRows": True})])
def test_who_serves(tokens: int, terms: int, is_delta: bool, is_wrong: bool, served: dict[str, bool]) -> None:
    generator = torch.Generator().manual_seed(1)
    decay, x, keys, queries = (torch.randn(1, tokens, *size, generator=generator) for size in ((1,), (1, 64), (1, terms), (1, terms)))
    call = (None, -decay.abs(), x.bfloat16(), keys / terms**0.5, queries, None, torch.full_like(decay, 0.5) if is_delta else None)
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    compared = Compared(emulation, lambda: False)
    scans, rows, convolution = (one(emulation, lambda: preset("h200")) for one in (ScanChunks, RecurrentRows, ShortConvolution))
    bodies = RecurrentBodies((scans, rows), convolution, compared)
    wrong = float("nan") if terms == 64 else 1.0
    with patch.object(ScanChunks, "__call__", lambda self, call, out: [one.fill_(wrong) for one in out]) if is_wrong else patch.dict({}):
        found = bodies.recurrence(*call)
    assert found is not None
    for mine, theirs in zip(found, recurrence(*call), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert {key[0]: agreed for key, agreed in compared.served.items()} == served


@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_states_advance_in_place_behind_the_first_call(is_delta: bool, turned: bool) -> None:
    """Of both operators, token by token: what the operators give with a copy behind them, wherever the results are wanted."""
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    compared = Compared(emulation, lambda: False)
    scans, rows, convolution = (one(emulation, lambda: preset("h200")) for one in (ScanChunks, RecurrentRows, ShortConvolution))
    bodies, generator = RecurrentBodies((scans, rows), convolution, compared), torch.Generator().manual_seed(4)
    state = torch.randn(*((1, 2, 32, 64) if turned else (1, 2, 64, 32)), generator=generator)
    state = state.mT if turned else state
    columns, weight = torch.randn(1, 16, 4, generator=generator), torch.randn(16, 4, generator=generator)
    wanted, kept = state.clone(), columns.clone()
    place = torch.zeros(1, 1, 2, 64), torch.zeros(1, 16, 1)
    for turn in range(4):
        sizes = (2,), (2, 64), (1, 32), (1, 32), (16,)
        decay, x, keys, queries, token = (torch.randn(1, 1, *size, generator=generator) for size in sizes)
        call = (-decay.abs(), x, keys / 32**0.5, queries, None, torch.full_like(decay, 0.5) if is_delta else None)
        given = (token.transpose(1, 2), weight, None, None, True)
        right, wanted = recurrence(wanted, *call)
        column, kept = torch.ops.agentcompile.causal_convolution.default(kept, *given)
        if turn == 0:  # nothing is compared yet
            assert bodies.recurrence_in_place(state, *call) is None and bodies.convolution_in_place(columns, *given) is None
            first, last = bodies.recurrence(state, *call), bodies.convolution(columns, *given)
            assert first is not None and last is not None
            state.copy_(first[1])
            columns.copy_(last[1])
            continue
        into = place if turn % 2 else (None, None)
        found = bodies.recurrence_in_place(state, *call, into=into[0]), bodies.convolution_in_place(columns, *given, into=into[1])
        for mine, theirs, where in zip((*found, state, columns), (right, column, wanted, kept), (*into, None, None), strict=True):
            assert mine is not None and (where is None or mine is where)
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    many = torch.randn(1, 3, 2, 64, generator=generator)
    keys, decay = torch.randn(1, 3, 1, 32, generator=generator), -torch.rand(1, 3, 2, generator=generator)
    assert bodies.recurrence_in_place(state, decay, many, keys, keys) is None


@pytest.mark.parametrize("tokens", [1, 80])
def test_operands_that_lie_so_already_but_begin_anywhere_are_copied(tokens: int) -> None:
    """A slice of a wider row: of one token, or of all of a tensor, it is contiguous at an address that no vector begins at."""
    generator = torch.Generator().manual_seed(1)

    def anywhere(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return torch.randn(count + 1, generator=generator).to(dtype)[1:].view(shape)

    decay = -torch.rand(1, tokens, 1, generator=generator)
    call = (None, decay, anywhere(1, tokens, 1, 64, dtype=torch.bfloat16), *(anywhere(1, tokens, 1, 32).div_(6) for _ in range(2)))
    emulation = load_catalog(only=("emulation",)).find("agentcompile_backends", "emulation")
    compared = Compared(emulation, lambda: False)
    scans, rows, convolution = (one(emulation, lambda: preset("h200")) for one in (ScanChunks, RecurrentRows, ShortConvolution))
    found = RecurrentBodies((scans, rows), convolution, compared).recurrence(*call)
    assert found is not None and list(compared.served.values()) == [True]
    for mine, theirs in zip(found, recurrence(*call), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
