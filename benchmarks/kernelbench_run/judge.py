"""One task in this process: compile its Model, compare it on fresh random inputs, time both, say who did the work.

Tasks are judged in inference mode (``eval()``): batch norm uses its running statistics and dropout does nothing. The public
harness never calls it, so that a task with either computes something else there; such rows say so.
"""

import copy
import random
import secrets
import time
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from covered import judging
from covered.ran import Launches
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import agentcompile_core as agentcompile
from agentcompile_core.configuration import Config
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.stages.capture.modules import inputs_of, load_file, run_file
from agentcompile_core.store import Store

from . import clock

SEED = 42  # of the public harness, for parameters
TRIALS = 5
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}  # of the public harness, absolute and relative
OURS = 1.25  # times the framework's own error against float64
WIDE_BYTES = 8 << 30  # of one set of inputs: beyond it there is no float64 beside it
MODES = (nn.Dropout, nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


@frozen(kw_only=True)
class Terms:
    """How tasks are judged: where, with what budget, beside which baseline, and how often each is timed (0: not)."""

    device: str
    dtype: str
    baseline: str
    budget_s: float
    budget_plans: int
    timings: int
    cache: str


def prepared() -> None:
    """Load the plugins, which is no part of a task's time."""
    load_catalog()


def judged(path: Path, terms: Terms) -> dict[str, Any]:
    """The row of one task.

    Raises:
        Exception: whatever building, compiling or running it raises.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # both sides keep the contract of fp32
    _seed(SEED)
    loaded = load_file(path, dtype=terms.dtype, device=terms.device, meta=False)
    module, examples = loaded.module, loaded.example_inputs
    catalog = load_catalog()
    launches = Launches(catalog.backends.values())
    began = time.monotonic()
    config = Config(device=terms.device, budget_s=terms.budget_s, budget_plans=terms.budget_plans)
    run_on = "emulation" if terms.device == "cpu" else "auto"
    mine = agentcompile.compile(copy.deepcopy(module), example_inputs=examples, run_on=run_on, config=config, catalog=catalog,
                                store=Store(Path(terms.cache) if terms.cache else None))
    seconds = time.monotonic() - began
    seeds = [secrets.randbits(31) for _ in range(TRIALS)]  # fresh, so that nothing can be made for them
    checks = _checked(module, mine, path, seeds, terms)
    by_itself = mine.session.runs_itself
    facts = launches.facts(None if by_itself else mine.session.program)
    times = _timed(module, mine, examples, terms) if terms.timings else {}
    reason = mine.graphs.eager_reason or (mine.notes[-1] if by_itself else "")
    return {"correct": all(why == "" for why, _ in checks), "why": next((why for why, _ in checks if why), ""),
            "correct_ours": _all_known([ours for _, ours in checks]), "seeds": seeds, "compile_s": round(seconds, 2),
            "reason": reason, "fallbacks": _fallbacks(mine), "is_fallback": facts["kernels_run"] == 0,
            "differs_from_public": any(isinstance(part, MODES) for part in module.modules()), **facts, **times}


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def _checked(module: nn.Module, mine: Any, path: Path, seeds: list[int], terms: Terms) -> list[tuple[str, bool | None]]:
    """For the inputs of each seed why the result is wrong by the public tolerance (empty: right), and whether by ours (None: not known)."""
    source, wide = run_file(path), _widened(module)
    answers = []
    for seed in seeds:
        _seed(seed)
        with torch.device(terms.device):
            inputs = inputs_of(source, terms.dtype)
        twins = judging.moved(inputs, terms.device)
        with torch.inference_mode():
            wanted = module(*inputs)
            found = mine(*twins)
        pairs = list(zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True))
        answers.append((next((why for pair in pairs if (why := _differs(*pair))), ""), _is_as_good(wide, inputs, found, wanted)))
    return answers


def _differs(found: Any, wanted: Any) -> str:
    if not isinstance(wanted, Tensor):
        return "" if found == wanted else f"{found!r} instead of {wanted!r}"
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{tuple(found.shape)} of {found.dtype} instead of {tuple(wanted.shape)} of {wanted.dtype}"
    tolerance = TOLERANCE.get(wanted.dtype, 0.0)
    if torch.allclose(found, wanted, atol=tolerance, rtol=tolerance, equal_nan=True):
        return ""
    difference = (found.double() - wanted.double()).abs()
    return f"differs by up to {float(difference.nan_to_num(torch.inf).max()):.3g}, the tolerance is {tolerance:g}"


def _widened(module: nn.Module) -> nn.Module | None:
    try:
        return copy.deepcopy(module).double()
    except torch.OutOfMemoryError:
        return None


def _is_as_good(wide: nn.Module | None, inputs: tuple[Any, ...], found: Any, wanted: Any) -> bool | None:
    tensors = [leaf for leaf in pytree.tree_leaves((inputs, wanted)) if isinstance(leaf, Tensor)]
    if wide is None or sum(8 * tensor.numel() for tensor in tensors) > WIDE_BYTES:
        return None
    doubled = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)
    try:
        with torch.inference_mode():
            exact = wide(*doubled)
    except (RuntimeError, torch.OutOfMemoryError):  # an operator without float64, or no room for it
        return None
    leaves = zip(*(pytree.tree_leaves(tree) for tree in (found, wanted, exact)), strict=True)
    return all(_no_worse(mine, theirs, true) for mine, theirs, true in leaves if isinstance(true, Tensor) and true.is_floating_point())


def _no_worse(mine: Tensor, theirs: Tensor, true: Tensor) -> bool:
    usable = torch.isfinite(true)
    mine, theirs, true = (tensor.double()[usable] for tensor in (mine, theirs, true))
    if not true.numel():
        return True
    rounding = torch.finfo(torch.float32).eps * float(true.abs().max())
    errors = [float((one - true).square().mean().sqrt()) for one in (mine, theirs)]
    return errors[0] <= max(OURS * errors[1], rounding)


def _all_known(answers: list[bool | None]) -> bool | None:
    return None if None in answers else all(answers)


def _timed(module: nn.Module, mine: Any, inputs: tuple[Any, ...], terms: Terms) -> dict[str, Any]:
    baseline = torch.compile(module) if terms.baseline == "compile" else module
    with torch.inference_mode():
        first = clock.mean_us(lambda: mine(*inputs), terms.timings, terms.device)
        theirs = clock.mean_us(lambda: baseline(*inputs), terms.timings, terms.device)
        second = clock.mean_us(lambda: mine(*inputs), terms.timings, terms.device)
    ours = (first + second) / 2  # around the baseline, so that a drift of the clocks is in both
    return {"us": ours, "baseline_us": theirs, "speedup": theirs / ours, "baseline": terms.baseline}


def _fallbacks(mine: Any) -> list[str]:
    selections = mine.compilation.selections if mine.compilation else ()
    return list(dict.fromkeys(f"{what}: {why}"[:300] for selection in selections for what, why in selection.fallback_reasons))[:20]
