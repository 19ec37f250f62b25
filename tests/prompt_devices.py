"""Devices that prompts of tests run on: with a library of attention, placing heads, or attending over all that is cached at once."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attention_library import library, over_all
from attrs import asdict
from torch import Tensor

from agentcompile_core.ops import live_attention, operators
from agentcompile_core.plugin_api import Heads, Scoring
from agentcompile_core.testing.doubles import ReplayingBackend

RMS, ROPE, GATED = "agentcompile.rms_norm.default", "agentcompile.rope.default", ("aten.silu.default", "aten.mul.Tensor")
SUM = ("aten.add.Tensor", RMS)


class WithLibrary(ReplayingBackend):
    """A device that captures, and has a library of attention and bodies of its own; ``calls`` counts those."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, ...]] = Counter()
        self.merged = 0

    def merge(self, parts: list[tuple[Tensor, Tensor]], out: Tensor) -> bool:
        assert all(one.transpose(1, 2).is_contiguous() for one in (out, *(rows for rows, _ in parts))), "as queries lie in memory"
        self.merged += len(parts)
        if len(parts) > 2:
            return False
        live_attention.merge(parts, out)
        return True

    def body(self, *ops: str) -> Callable[..., Tensor | None] | None:
        known = {(RMS,): operators.rms_norm, GATED: lambda gate, up: torch.nn.functional.silu(gate) * up, ("aten.mul.Tensor",): None,
                 (ROPE,): lambda *_: None}

        def counted(*args: Any) -> Tensor | None:
            self.calls[ops] += 1
            return known[ops](*args)  # type: ignore[no-any-return]

        return counted if known.get(ops) is not None else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor] | None:
        return library(q, k, v, causal=causal, scale=scale)


class Placing(WithLibrary):
    """One that writes heads where they belong and computes sums with their norms too; ``placed`` says of which heads it did how much."""

    def __init__(self) -> None:
        super().__init__()
        self.placed: Counter[tuple[tuple[bool, bool], ...]] = Counter()

    def place(self, heads: Sequence[Heads]) -> bool:
        assert [one.at is not None for one in heads] in ([False, True, True], [False] * 3)
        self.placed[tuple((bool(one.norm), bool(one.turn)) for one in heads)] += 1
        for one in heads:
            rows = operators.rms_norm(one.rows, *one.norm) if one.norm else one.rows
            rows = operators.rope(rows, *one.turn) if one.turn else rows
            start = 0 if one.at is None else int(one.at)
            one.out[:, :, start : start + rows.shape[2]].copy_(rows)
        return True

    def body(self, *ops: str) -> Callable[..., Any] | None:
        if ops != SUM:
            return super().body(*ops)

        def both(left: Tensor, right: Tensor, *others: Any) -> tuple[Tensor, Tensor] | None:
            self.calls[ops] += 1
            return (left + right, operators.rms_norm(left + right, *others)) if self.calls[ops] % 5 else None

        return both


class OverAll(Placing):
    """One that attends over everything cached at once, but for some of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def attend_cached(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, scale: float,
                      scoring: Scoring | None = None) -> bool:
        self.asked += 1
        return self.asked % 7 > 0 and over_all(q, k, v, out, scale=scale, **(asdict(scoring, recurse=False) if scoring else {}))
