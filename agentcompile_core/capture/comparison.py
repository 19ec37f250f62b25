"""Every graph against its module: interpreted on the framework's operators before it may serve anything.

Plain modules: one call on the example inputs, one on random ones. Language models: a prompt in two chunks and two decode
steps, through every chunk size, against the model's own forward and cache. Half precision is compared as it is and, where
memory allows, once more on a copy widened to float32.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..graph import Graph, GraphKind, GraphSet
from ..interfaces import LoadedModel
from ..interpreter import prepare
from .agreement import disagreement
from .export import evaluating
from .generation import GraphRun, plan, reference

HALVES = (torch.float16, torch.bfloat16)
WIDENED_BYTES = 1 << 30  # on the CPU; on a GPU half of what is free
SEED = 20240229


def difference(graphs: GraphSet, loaded: LoadedModel) -> str:
    """One clause on how the graphs compute something else than ``loaded.module``; empty where they agree.

    Nothing is compared, and nothing claimed, where there are no graphs or no weights. The module is left as it was.
    """
    if not graphs.graphs or not _has_data(loaded):
        return ""
    with torch.inference_mode(), evaluating(loaded.module), _undisturbed(loaded.module):
        try:
            return _compared(graphs, loaded)
        except Exception as exc:  # whatever a stored graph or a user's module raises: what cannot be compared is not served
            return f"they could not be compared ({type(exc).__name__}: {' '.join(str(exc).split())[:200]})"


def _compared(graphs: GraphSet, loaded: LoadedModel) -> str:
    calls = _calls_of_module if graphs.kv is None else _calls_of_model
    exact, why = calls(graphs, loaded, loaded.module, None)
    if why or exact or not _is_half(loaded.module):
        return why
    wide = _widened(loaded.module)
    if wide is None:
        return ""
    try:
        return calls(graphs, loaded, wide, torch.float32)[1]
    except Exception:  # a module that names its element type in its code cannot be widened; its own type was compared
        return ""
    finally:
        del wide
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _calls_of_module(graphs: GraphSet, loaded: LoadedModel, module: nn.Module, wide: torch.dtype | None) -> tuple[bool, str]:
    graph = next(g for g in graphs.graphs if g.kind is GraphKind.FORWARD)
    given = tuple(getattr(loaded, "example_inputs", ())) or _made_inputs(graph, loaded.module)
    exact, why = _one_call(graph, module, given, wide)
    if why:
        return False, why
    try:
        also, why = _one_call(graph, module, _random_inputs(given), wide)
    except Exception:  # random numbers need not be what the module takes; its own examples were compared
        return exact, ""
    return exact and also, why


def _one_call(graph: Graph, module: nn.Module, given: tuple[object, ...], wide: torch.dtype | None) -> tuple[bool, str]:
    def fresh() -> list[object]:
        copies = [a.clone() if isinstance(a, Tensor) else a for a in given]
        return [a.to(wide) if wide and isinstance(a, Tensor) and a.dtype in HALVES else a for a in copies]

    torch.manual_seed(SEED)
    answer = module(*fresh())
    wanted = [leaf for leaf in torch.utils._pytree.tree_leaves(answer) if isinstance(leaf, Tensor)]
    device = next((a.device for a in given if isinstance(a, Tensor)), torch.device("cpu"))
    tensors = [a for a in fresh() if isinstance(a, Tensor)]
    environment = {**_tensors_of(module), **dict(zip(graph.inputs, tensors, strict=True))}
    torch.manual_seed(SEED)
    found = prepare(graph, device=device, dtype_override=wide).bind(environment)()
    return _exact(found, wanted), disagreement(found, wanted)


def _calls_of_model(graphs: GraphSet, loaded: LoadedModel, model: nn.Module, wide: torch.dtype | None) -> tuple[bool, str]:
    trial = plan(graphs, model)
    wanted = reference(model, trial)
    exact = True
    for tokens in trial.chunks:
        run = GraphRun(graphs, _tensors_of(model), trial.device, wide)
        found = run.logits(trial, tokens)
        why = run.wrong_state or disagreement([torch.stack(found)], [torch.stack(wanted)])
        if why:
            return False, why
        exact = exact and _exact(found, wanted)
    return exact, ""


def _exact(found: "list[Tensor] | tuple[Tensor, ...]", wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def _made_inputs(graph: Graph, module: nn.Module) -> tuple[object, ...]:
    device = next((t.device for t in module.parameters()), torch.device("cpu"))
    specs = [graph.spec(name) for name in graph.inputs]
    return _random_inputs(tuple(torch.zeros(s.shape, dtype=getattr(torch, s.dtype.value), device=device) for s in specs))


def _random_inputs(given: tuple[object, ...]) -> tuple[object, ...]:
    """Normal floats of the same shapes, types and strides; integers and plain values as they are."""
    torch.manual_seed(SEED)
    return tuple(torch.randn_like(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in given)


def _is_half(module: nn.Module) -> bool:
    return any(t.dtype in HALVES for t in _tensors_of(module).values())


def _has_data(loaded: LoadedModel) -> bool:
    tensors = [*_tensors_of(loaded.module).values(), *(a for a in getattr(loaded, "example_inputs", ()) if isinstance(a, Tensor))]
    return not any(t.is_meta for t in tensors)


def _widened(module: nn.Module) -> nn.Module | None:
    """A copy in float32; None where memory does not allow one or the module does not copy."""
    wide_bytes = 4 * sum(t.numel() for t in module.parameters())
    device = next((t.device for t in module.parameters()), torch.device("cpu"))
    room = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else WIDENED_BYTES
    if wide_bytes > room:
        return None
    try:
        return copy.deepcopy(module).float()
    except Exception:  # a module may hold what cannot be copied
        return None


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Random state and buffers are afterwards what they were."""
    devices = sorted({t.device.index or 0 for t in module.parameters() if t.device.type == "cuda"})
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for name, buffer in module.named_buffers():
                if name in before and buffer.shape == before[name].shape and not torch.equal(buffer, before[name]):
                    buffer.copy_(before[name])
