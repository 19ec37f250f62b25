"""A graph that differs from its module by no more than roundings might: both against what they compute in float64.

Where a model magnifies roundings (many layers, sharp softmaxes, a router's choice), two right computations in float32 or half precision
are far apart, and how far says nothing. In float64 there is next to nothing to be magnified: what differs there is another function. And
what rounds more often or earlier than the module does is further from float64 than the module is, in the types that they name.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor

from ...ops.agreement import disagreement
from .retyped import Retyped, Types

HALF, SINGLE, DOUBLE = (torch.float16, torch.bfloat16), torch.float32, torch.float64
EXACT: Types = {**dict.fromkeys(HALF, DOUBLE), SINGLE: DOUBLE}
EXACT_OF_SINGLE: Types = {SINGLE: DOUBLE}  # a graph in float32 that rounds to half precision somewhere keeps doing so
WIDE: Types = dict.fromkeys(HALF, SINGLE)
# Half precision would be magnified to the size of the results: its roundings 2^16 times smaller, beside what float32 kept apart from them.
RELAXED: Types = {**dict.fromkeys(HALF, SINGLE), SINGLE: DOUBLE}
EXACT_SHARE = 1e-9  # right graphs differ by up to 4e-13; a scale that is wrong by 1e-3 where softmaxes are saturated, by 6e-7
# Graphs are to be the function of their module for any parameters: those of a model may hide mistakes, by softmaxes that are saturated.
CALM = 1 / 16
DRAWS = 3
AS_NEAR = 8.0  # times the error of the module itself: of 115 usual models none came to more than 1.6, of 144 chaotic ones one, to 46
MAGNIFIED = 0.1  # of the rms: an error of the module's own so large says nothing any more


@frozen
class Call:
    """What the graphs and the module gave for one call; ``wrong``: what is wrong beside that."""

    found: Sequence[Tensor]
    wanted: Sequence[Tensor]
    wrong: str = ""


@frozen(kw_only=True)
class Trial:
    """``calls`` makes the same ones each time, ``count`` of them; ``given``: all tensors that they read from outside.

    ``matrices``: those of ``given`` that are parameters with two axes or more.
    """

    calls: Callable[[], Iterator[Call]]
    count: int
    given: Sequence[Tensor]
    matrices: Sequence[Tensor]


def difference(drawn: Callable[[int], Trial], exact: Types, near: Sequence[Types]) -> str:
    """One clause on how graphs compute something else than their module, or round more; empty where they do not.

    ``drawn``: a trial by its number, each with other inputs; ``exact``: what float64 stands for; ``near``: types in which the graphs are
    to be as near to it as the module. What is magnified has one direction, in which one of two right results may err little by chance,
    and a router's choice may fall otherwise: who rounds too much does so in most of three draws.

    Raises:
        Exception: whatever a module raises that does not run in these types.
    """
    for draw in range(DRAWS):
        trial = drawn(draw)
        truth = _made(trial, exact)
        if why := _unlike(truth):
            return f"in float64 {why}"
        if why := _unlike(_made(trial, exact, CALM)):
            return f"in float64, with matrices that are {CALM:g} of its own, {why}"
        why = next((why for types in near if (why := _further(_made(trial, types), truth, _epsilon(types)))), "")
        if not why and not draw:
            return ""
        if why and draw:
            return why
    return ""


def _unlike(calls: Sequence[Call]) -> str:
    return next((why for one in calls if (why := one.wrong or disagreement(one.found, one.wanted, share=EXACT_SHARE))), "")


def _made(trial: Trial, types: Types, factor: float = 1.0) -> list[Call]:
    with Retyped(types, trial.given, trial.matrices if factor != 1.0 else (), factor):
        calls = list(trial.calls())
    if len(calls) != trial.count:
        raise RuntimeError(f"{len(calls)} of {trial.count} calls can be made")
    return calls


def _further(calls: Sequence[Call], truth: Sequence[Call], epsilon: float) -> str:
    """One clause on how much further the graphs of ``calls`` are from the module's results in ``truth`` than the module is."""
    ours = _apart([call.found for call in calls], truth)
    theirs = _apart([call.wanted for call in calls], truth)
    if not theirs <= MAGNIFIED:
        return f"its module's own roundings come to {theirs:.3g} of its results, which hides those of its graphs"
    return "" if ours <= AS_NEAR * max(theirs, epsilon) else f"its roundings come to {ours:.3g} where its module's own come to {theirs:.3g}"


def _apart(results: Sequence[Sequence[Tensor]], truth: Sequence[Call]) -> float:
    """The relative rms error of all floats of several calls, each result by its own rms."""
    squares = [0.0]
    for one, call in zip(results, truth, strict=True):
        for found, wanted in zip(one, call.wanted, strict=True):
            if wanted.is_floating_point():
                finite = torch.isfinite(wanted)
                true, error = wanted[finite].double(), found[finite].double() - wanted[finite].double()
                size = float(true.square().sum())
                squares.append(float(error.square().sum()) / size if size else float(error.any()))
    return float((sum(squares) / max(1, len(squares) - 1)) ** 0.5)


def _epsilon(types: Types) -> float:
    """One rounding of the narrowest type that is computed in."""
    return torch.finfo(max(types.values(), key=lambda dtype: torch.finfo(dtype).eps, default=SINGLE)).eps
