"""Every graph against its module: interpreted on the framework's operators before it may serve anything.

Plain modules: one call on the example inputs, one on random ones. Language models: a prompt in two chunks and two decode
steps, through every chunk size that does not follow from others, against the model's own forward and cache. Half precision is
compared as it is and, where memory allows, once more on a copy widened to float32. Results that half precision computes and a
cast makes float32 (logits behind ``.float()``) err as halves do: they may only where the widened copy agrees. What differs by no
more than roundings might is judged in float64, see ``comparison_exact``.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...garbage import uncollected
from ...ir.frequencies import unlike
from ...ir.graph import STATE_PREFIX, Graph, GraphKind, GraphSet, ValueKind
from ...ir.weight_source import transposed
from ...ops.agreement import disagreement, is_by_rounding
from ...ops.dtypes import zeros
from ...ops.interpreter import Prepared, compile_nodes
from ...plugin.interfaces import LoadedModel
from ...runtime import calls
from ...runtime.as_captured import as_captured
from ...runtime.device import free_bytes, release_cache
from . import comparison_exact
from .chunk_sizes import followers, telling
from .comparison_exact import DRAWS, EXACT, EXACT_OF_SINGLE, RELAXED, WIDE, Call, Trial
from .comparison_run import HALVES, GraphRun, plan, prompt_rows, reference
from .evaluating import evaluating
from .left_behind import ALONE, undisturbed
from .rotary import frequencies_of

WIDENED_BYTES = 1 << 30  # on the CPU; on an accelerator half of what is free
SEED = 20240229

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Made = Callable[[nn.Module, torch.dtype | None], Iterator[Call]]  # of a module, and the type that the graphs compute in


@define
class Agreed:
    """A digest of what graphs and module gave where that was found to be the same but for roundings.

    ``before``: in an earlier comparison of the same graphs; ``now``: in this one. Where the same bits come out again on both sides,
    neither a widened copy nor float64 is run again, which takes a deep model a second, and a minute.
    """

    before: str = ""
    now: str = ""


def difference(graphs: GraphSet, loaded: LoadedModel, agreed: Agreed | None = None, between: tuple[int, ...] | None = None) -> str:
    """One clause on how the graphs compute something else than ``loaded.module``; empty where they agree.

    ``between``: what ``chunk_sizes.followers`` says of the graphs, where that is known. Nothing is compared, and nothing claimed, where
    there are no graphs or no weights. The module is left as it was.
    """
    if not graphs.graphs or not has_data(loaded):
        return ""
    apart = as_captured() if graphs.kv is not None else nullcontext()
    with ALONE, apart, torch.inference_mode(), evaluating(loaded.module), undisturbed(loaded.module):
        try:
            why = _misfit(graphs, loaded.module) or _turned_otherwise(graphs, loaded.module)
            return why or _compared(graphs, loaded, agreed or Agreed(), followers(graphs) if between is None else between)
        except Exception as exc:  # whatever a stored graph or a user's module raises: what cannot be compared is not served
            return f"they could not be compared ({type(exc).__name__}: {' '.join(str(exc).split())[:200]})"


def _misfit(graphs: GraphSet, module: nn.Module) -> str:
    """What graphs read of the module and it has not, or in another shape; empty: nothing."""
    tensors = weights_of(module)
    for graph in graphs.graphs:
        for value in graph.values:
            if value.kind not in (ValueKind.WEIGHT, ValueKind.CONSTANT):
                continue
            found = tensors.get(value.source)
            if found is None or tuple(found.shape) != value.spec.shape:
                shape = "nothing" if found is None else list(found.shape)
                return f"graph {graph.name} reads {value.source} as {list(value.spec.shape)}, which is {shape} in the model"
    return ""


def _turned_otherwise(graphs: GraphSet, module: nn.Module) -> str:
    """How the module turns long sequences, which no few tokens show, otherwise than graphs say; empty: as they say."""
    if graphs.kv is None:
        return ""
    found = frequencies_of(module, graphs.graphs)
    return unlike(found, graphs.frequencies)


def _compared(graphs: GraphSet, loaded: LoadedModel, agreed: Agreed, between: tuple[int, ...]) -> str:
    narrow = _narrow(loaded.module)
    with uncollected():  # of a deep model's many small objects that takes a sixth of the time
        made, _ = _calls_of(graphs, loaded, between)
        judged = _judged(made(loaded.module, None), narrow)
        why, is_narrow, wide = judged.why, narrow is not None and not judged.exact, None
        if judged.bits and judged.bits == agreed.before:
            agreed.now = judged.bits
            return ""
        if is_narrow and not judged.why_narrow and (wide := _compared_wide(made, loaded.module)) is not None:
            why = wide.why
    if not why and wide is not None:
        agreed.now = judged.bits
    if not is_by_rounding(why):
        return why
    near = ((RELAXED, WIDE) if judged.why_narrow else (WIDE,)) if is_narrow else ({},)

    def drawn(draw: int) -> Trial:
        made, inputs = _calls_of(graphs, loaded, between, draw)
        return Trial(calls=lambda: made(loaded.module, None), count=judged.count, given=(*_tensors_of(loaded.module).values(), *inputs),
                     matrices=[p for p in loaded.module.parameters() if p.dim() > 1])

    try:
        exactly = comparison_exact.difference(drawn, EXACT if is_narrow else EXACT_OF_SINGLE, near)
    except Exception:  # operators that know their own types alone, or no memory
        return why
    finally:
        release_cache()
    if exactly:
        return f"{why}; {exactly}"
    agreed.now = judged.bits
    return ""


def _compared_wide(made: Made, module: nn.Module) -> "_Judged | None":
    """The same of a copy in float32; None where there is none."""
    wide = _widened(module)
    if wide is None:
        return None
    try:
        return _judged(made(wide, torch.float32))
    except Exception:  # a module that names its element type in its code cannot be widened; its own type was compared
        return None
    finally:
        del wide
        release_cache()


@frozen
class _Judged:
    """How many calls there were, whether all gave the same bits, and how one differs: as it is, and as results of a narrow type.

    ``bits``: a digest of what was given and wanted, of a narrow type all of it, else where they differ by what roundings might make;
    empty where there is nothing of that, or something else is wrong.
    """

    count: int
    exact: bool
    why: str
    why_narrow: str = ""
    bits: str = ""


def _judged(made: Iterator[Call], narrow: torch.dtype | None = None) -> _Judged:
    """``narrow``: the type that half precision computes in. Calls end at the first that differs by what no rounding makes."""
    count, exact, why, why_narrow, bits = 0, True, "", "", hashlib.sha256()
    for count, call in enumerate(made, 1):
        wrong = call.wrong or disagreement(call.found, call.wanted)
        exact = exact and not wrong and _exact(call.found, call.wanted)
        if wrong and not is_by_rounding(wrong):
            return _Judged(count, False, wrong, wrong)
        if wrong:
            why, why_narrow = why or wrong, why_narrow or (disagreement(call.found, call.wanted, narrow) if narrow else wrong)
        if wrong or narrow:
            bits.update(f"{len(call.found)} of {len(call.wanted)}: ".encode())
            for tensor in (*call.found, *call.wanted):
                bits.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + _bytes(tensor))
    return _Judged(count, exact, why, why_narrow, bits.hexdigest() if why or narrow else "")


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    return (torch.view_as_real(flat).flatten() if flat.is_complex() else flat).view(torch.uint8).numpy().tobytes()


def given_to(loaded: LoadedModel) -> Arguments:
    """The example inputs of a plain module, by position and by name."""
    return tuple(getattr(loaded, "example_inputs", ())), getattr(loaded, "example_keywords", {})


def _calls_of(graphs: GraphSet, loaded: LoadedModel, between: tuple[int, ...], draw: int = 0) -> tuple[Made, Sequence[Tensor]]:
    """The calls to compare, and the tensors that a plain module is given in them; other tokens or numbers for each ``draw``."""
    if graphs.kv is not None:
        return partial(_calls_of_model, graphs, telling(graphs, between), draw), ()
    given = given_to(loaded)
    if not tensors_among(given):
        given = (_made_inputs(next(g for g in graphs.graphs if g.kind is GraphKind.FORWARD), loaded.module), {})
    drawn = random_inputs(given, draw)
    given = random_inputs(given, DRAWS + draw) if draw else given
    return partial(_calls_of_module, graphs, given, drawn), tensors_among((given, drawn))


def _calls_of_module(graphs: GraphSet, given: Arguments, random: Arguments, module: nn.Module, wide: torch.dtype | None) -> Iterator[Call]:
    yield _one_call(graphs, module, given, wide)
    try:
        drawn = _one_call(graphs, module, random, wide)
    except Exception:  # random numbers need not be what the module takes; its own examples were compared
        return
    yield drawn


def _one_call(graphs: GraphSet, module: nn.Module, given: Arguments, wide: torch.dtype | None) -> Call:
    def fresh() -> Arguments:
        def copy_of(a: Tensor) -> Tensor:
            return a.to(wide) if wide and a.dtype in HALVES else a.clone()

        copied: Arguments = pytree.tree_map_only(Tensor, copy_of, given)
        return copied

    graph, call = next(g for g in graphs.graphs if g.kind is GraphKind.FORWARD), calls.read(graphs.call)
    torch.manual_seed(SEED)
    args, keywords = calls.by_name(module, *fresh())
    wanted = tensors_among(module(*args, **keywords))
    inputs = call.tensors(*fresh()) if call else tensors_among(fresh())
    device = inputs[0].device if inputs else torch.device("cpu")
    environment = {**weights_of(module), **dict(zip(graph.inputs, inputs, strict=True))}
    torch.manual_seed(SEED)
    results = compile_nodes(graph, device=device, dtype_override=wide).bind(environment)()
    return Call(tensors_among(calls.rebuilt(call.outputs, results)) if call else results, wanted)


def tensors_among(value: Any) -> list[Tensor]:
    """Every tensor of nested containers, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _calls_of_model(graphs: GraphSet, chunks: tuple[int, ...], draw: int, model: nn.Module, wide: torch.dtype | None) -> Iterator[Call]:
    prepared, tensors, trials = dict[str, Prepared](), weights_of(model), plan(graphs, model, chunks, draw)
    tensors |= {one.source: tensors[one.source].new_tensor(one.near) for one in graphs.frequencies}
    rows = prompt_rows(model, [trial for trial in trials if not trial.steps])
    for trial in trials:
        wanted = torch.stack(reference(model, trial)) if trial.steps else rows[trial.first]
        for tokens, fresh in ((tokens, fresh) for tokens in trial.chunks for fresh in (("_fresh",) if trial.steps else ("_fresh", ""))):
            run, one = GraphRun(graphs, tensors, trial.device, wide, prepared), trial if tokens == min(trial.chunks) else trial.shortened()
            found = torch.stack(run.logits(one, tokens, fresh))
            yield Call((found,), (wanted[: len(found)],), run.wrong_state)
            if trial.steps and tokens == min(trial.chunks) and tokens and recurs(graphs):
                yield Call((), (), GraphRun(graphs, tensors, trial.device, wide, prepared).handed_on(trial, tokens))


def recurs(graphs: GraphSet) -> bool:
    """Whether the graphs hold a state of a recurrence, or what may be one."""
    return any(not name.startswith(f"{STATE_PREFIX}conv.") for name in graphs.states)


def _exact(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """What graphs of ``module`` may read of it, by name: its tensors and the transpositions of its matrices."""
    turned = {transposed(name): p.t() for name, p in module.named_parameters(remove_duplicate=False) if p.dim() == 2}
    return {**_tensors_of(module), **turned}


def _made_inputs(graph: Graph, module: nn.Module) -> tuple[object, ...]:
    device = next((t.device for t in module.parameters()), torch.device("cpu"))
    made = tuple(zeros(graph.spec(name), device) for name in graph.inputs)
    return random_inputs((made, {}))[0]


def random_inputs(given: Arguments, draw: int = 0) -> Arguments:
    """Normal floats of the same shapes, types and strides, and truth values of any kind; integers and plain values as they are."""
    def other(a: Tensor) -> Tensor:
        if a.dtype is torch.bool:
            return torch.rand(a.shape, device=a.device) < 0.5
        return torch.randn_like(a) if a.is_floating_point() else a

    torch.manual_seed(SEED + draw)
    drawn: Arguments = pytree.tree_map_only(Tensor, other, given)
    return drawn


def _narrow(module: nn.Module) -> torch.dtype | None:
    """The type of half precision that the module's tensors have, the coarser one of two; None: none has any."""
    found = {t.dtype for t in _tensors_of(module).values()} & set(HALVES)
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def has_data(loaded: LoadedModel) -> bool:
    """Whether the model and its example inputs hold numbers."""
    tensors = [*_tensors_of(loaded.module).values(), *tensors_among(given_to(loaded))]
    return not any(t.is_meta for t in tensors)


def _widened(module: nn.Module) -> nn.Module | None:
    """A copy in float32; None where memory does not allow one or the module does not copy."""
    wide_bytes = 4 * sum(t.numel() for t in module.parameters())
    device = next((t.device for t in module.parameters()), torch.device("cpu"))
    free = free_bytes(device)
    room = WIDENED_BYTES if free is None else free // 2
    if wide_bytes > room:
        return None
    try:
        return copy.deepcopy(module).float()
    except Exception:  # a module may hold what cannot be copied
        return None
