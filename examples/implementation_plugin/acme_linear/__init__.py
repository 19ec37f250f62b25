"""An implementation from outside: one row times one weight matrix, by the library behind ``torch.mv``."""

from collections.abc import Callable
from typing import Literal

import torch

from agentcompile_core.plugin_api import (
    LINEAR,
    Implementation,
    Match,
    Origin,
    Reject,
    Schedule,
    ScheduleSpace,
    Target,
    hookimpl,
)


class AcmeLinear(Implementation):
    """``linear`` matches without a norm before and without anything behind: out[n] = weight[n, k] x[k]."""

    name = "linear"
    version = 1
    origin = Origin.THIRD_PARTY
    capturable = True

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """Plain products of one matrix."""
        if match.kind != LINEAR:
            return Reject(f"acme_linear serves {LINEAR} matches, not {match.kind}")
        if match.epilogue is not None or match.text("norm") != "none" or match.integer("pair") != 1:
            return Reject("acme_linear serves plain products: no norm, no second matrix, nothing behind")
        if len({operand.spec.dtype for operand in match.operands}) > 1:
            return Reject("acme_linear serves operands and results of one type")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """No choices: one empty schedule."""
        return ScheduleSpace(parameters=(), points=(Schedule({}),))

    def bind(self, match: Match, schedule: Schedule, target: Target) -> Callable[..., None]:
        """What depends on the match is decided here, once; ``run`` serves every layer."""
        n, k = match.integer("n"), match.integer("k")

        def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            torch.mv(weight, x.view(k), out=out.view(n))

        return run


@hookimpl
def agentcompile_implementations() -> list[Implementation]:
    """What this distribution offers."""
    return [AcmeLinear()]
