"""torch.export of a causal language model: the decode step and prompt chunks, over state that the session owns."""

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.export
from attrs import frozen
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...ir.graph import OFFSET, KVSpec
from ...ops.dtypes import torch_dtype
from ...runtime import calls
from .attention import IMPLEMENTATION, PassThroughCache, Recorder, Tracing, Unsupported, recording
from .evaluating import evaluating
from .experts import semantic_experts
from .grouped import Grouped
from .known import knowing
from .left_behind import undisturbed
from .own_states import OwnStates
from .reached import Call, calls_of
from .recurrences import semantic_recurrences
from .rotary import semantic_rotary
from .states import Held, cache_keyword
from .triangles import triangles_solved
from .unread import without_what_nobody_reads

NOTHING = Held()
PREFIX = "model."


@frozen
class Exported:
    """An ExportedProgram, the names of its tensor inputs in order, the model whose parameters it holds and their prefix."""

    program: torch.export.ExportedProgram
    inputs: tuple[str, ...]
    model: nn.Module
    prefix: str = PREFIX


class _Step(nn.Module):
    """What both graphs share: the model called with a pass-through cache."""

    model: nn.Module

    def __init__(self, model: nn.Module, kv: KVSpec, tracing: Tracing = Tracing.PLAIN, held: Held = NOTHING) -> None:
        super().__init__()
        self.model = model
        self.layers, self.capacity, self.tracing, self.held = kv.layers, kv.capacity, tracing, held

    def recorder(self, caches: tuple[Tensor, ...], position: Tensor, tokens: int = 1, valid: Tensor | None = None) -> Recorder:
        """What sees the calls of attention and cache: ``caches`` are K and then V of all layers, then the states."""
        states = caches[2 * self.layers : 2 * self.layers + len(self.held.states)]
        keys, values = caches[: self.layers], caches[self.layers : 2 * self.layers]
        return Recorder(keys, values, position, self.capacity, tokens=tokens, tracing=self.tracing, held=self.held, states=states,
                        valid=None if self.held.whole_chunks else valid)

    def call(self, ids: Tensor, positions: Tensor, recorder: Recorder, row: Tensor | None) -> Tensor:
        """Logits of ``ids`` [1, T] at ``positions`` [T]; of the one ``row`` i64 [1] only where it is given."""
        parameters = inspect.signature(self.model.forward).parameters
        keyword = cache_keyword(self.model)
        # A model that takes no positions counts on from what its cache says.
        keywords: dict[str, Any] = {"position_ids": positions.unsqueeze(0)} if "position_ids" in parameters else {}
        if row is not None and "logits_to_keep" in parameters:
            keywords["logits_to_keep"] = row
        own = OwnStates(self.model, self.held, recorder.states)
        cache = own.cache(PassThroughCache(recorder))
        hidden = None if "logits_to_keep" in keywords else row
        with own.installed(), recording(recorder), knowing(), Grouped(), _one_row(self.model, hidden):
            if self.tracing is Tracing.OWN and "attention_mask" in parameters:  # of all positions: a bias may be made from it
                keywords["attention_mask"] = torch.ones(1, recorder.capacity, dtype=torch.int64, device=ids.device)
            answer = self.model(input_ids=ids, use_cache=True, **{keyword: cache}, **keywords)
            own.write(getattr(answer, keyword, cache))
        recorder.finish()
        logits: Tensor = answer.logits
        return logits


class DecodeStep(_Step):
    """One token. Inputs: ids [1, 1], position [1], history [capacity + 1], all i64, then K, V and states of all layers, and the offset
    i64 [1] where there is one."""

    def forward(self, ids: Tensor, position: Tensor, history: Tensor, *caches: Tensor) -> tuple[Tensor, Tensor]:
        turned = position + caches[-1] if self.held.offset else position
        logits = self.call(ids, turned, self.recorder(caches, position), None)
        token = torch.ops.agentcompile.argmax.default(logits)
        torch.ops.agentcompile.advance.default(token, ids, position, history)
        return logits, token


class PrefillChunk(_Step):
    """T tokens of a prompt, the last T - length of them padding. Inputs: prompt [1, T], start [1], length [1], then as in DecodeStep."""

    def forward(
        self, prompt: Tensor, start: Tensor, length: Tensor, ids: Tensor, position: Tensor, history: Tensor, *caches: Tensor
    ) -> tuple[Tensor, Tensor]:
        # Padding rows repeat the last position: a table of positions is never read beyond its end.
        positions = torch.minimum(start + torch.arange(prompt.shape[1], device=prompt.device), start + length - 1)
        logits = self.call(prompt, positions, self.recorder(caches, start, prompt.shape[1], length), length - 1)
        token = torch.ops.agentcompile.argmax.default(logits)
        torch.ops.agentcompile.start_decode.default(token, ids, position, history, start, length)
        return logits, token


@contextmanager
def _one_row(model: nn.Module, row: Tensor | None) -> Iterator[None]:
    """For models without ``logits_to_keep``: the output embedding sees only ``row`` of the hidden states."""
    if row is None:
        yield
        return
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if head is None:
        raise Unsupported("it has neither logits_to_keep nor an output embedding")
    hook = head.register_forward_pre_hook(lambda _, args: (args[0].index_select(1, row), *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def export_decode(model: nn.Module, kv: KVSpec, tracing: Tracing = Tracing.PLAIN, held: Held = NOTHING) -> Exported:
    """Export the decode step of ``model``. The device is that of its parameters; nothing is computed.

    ``tracing``: what is marked for own_attention.py or derived.py, which find it in the graph. ``held``: what its cache holds.
    """
    device = next(model.parameters()).device
    state, names = _step(kv, device, held)
    return _export(DecodeStep(model, kv, tracing, held), state, names)


def export_prefill(model: nn.Module, kv: KVSpec, tokens: int, tracing: Tracing = Tracing.PLAIN, held: Held = NOTHING) -> Exported:
    """Export a continuation chunk of ``tokens`` prompt tokens; ``tracing`` as above."""
    arguments, names = _chunk(kv, tokens, next(model.parameters()).device, held)
    return _export(PrefillChunk(model, kv, tracing, held), arguments, names)


def calls_of_prefill(
    model: nn.Module, kv: KVSpec, tokens: int, tracing: Tracing = Tracing.PLAIN, held: Held = NOTHING
) -> tuple[Call, ...]:
    """What a trace of ``export_prefill`` would record, found without one. ``model`` is left as it was.

    Raises:
        Unlike: it cannot be seen. Whatever the model raises on tensors without memory is raised, too.
    """
    return _calls(PrefillChunk(model, kv, tracing, held), _chunk(kv, tokens, torch.device("meta"), held)[0])


def calls_of_decode(model: nn.Module, kv: KVSpec, tracing: Tracing = Tracing.PLAIN, held: Held = NOTHING) -> tuple[Call, ...]:
    """The same of ``export_decode``."""
    return _calls(DecodeStep(model, kv, tracing, held), _step(kv, torch.device("meta"), held)[0])


def _calls(step: _Step, arguments: tuple[Tensor, ...]) -> tuple[Call, ...]:
    from torch._export.utils import _compiling_state_context  # models ask whether they are exported

    with undisturbed(step.model), _as_traced(step), _compiling_state_context():
        return calls_of(step, arguments)


def calls_of_graph(run: Callable[[dict[str, Tensor]], Any], model: nn.Module, kv: KVSpec, tokens: int, held: Held) -> tuple[Call, ...]:
    """What ``run`` calls over the tensors of ``model`` and of a chunk of ``tokens`` (0: of the decode step), given by their names.

    The tensors are numbered as those of ``calls_of_prefill`` and ``calls_of_decode`` are.
    """
    step = _Step(model, kv)
    arguments, names = given_to(kv, tokens, torch.device("meta"), held)

    def named(tensors: dict[str, Tensor]) -> Any:
        return run({**{name.removeprefix(PREFIX): one for name, one in tensors.items()}, **dict(zip(names, arguments, strict=True))})

    with torch.no_grad():
        return calls_of(step, arguments, named)


def export_forward(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any] | None = None) -> Exported:
    """Export one forward of a plain module for the shapes of its arguments; their tensors become ``input.<i>``, nested ones in order."""
    given = pytree.tree_map_only(Tensor, _apart, calls.by_name(module, args, keywords or {}))
    names = tuple(f"input.{i}" for i, _ in enumerate(a for a in pytree.tree_leaves(given) if isinstance(a, Tensor)))
    with quiet(), evaluating(module), torch.no_grad():
        program = _traced(module, given[0], given[1] or None)
    return Exported(program, names, module, prefix="")


def _apart(tensor: Tensor) -> Tensor:
    """A tensor like ``tensor`` that is nobody else's, as sessions hand it on: a trace takes two names of one object for one input."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _state(kv: KVSpec, device: torch.device, held: Held) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    position = torch.zeros(1, dtype=torch.int64, device=device)
    history = torch.zeros(kv.capacity + 1, dtype=torch.int64, device=device)
    # Only shapes matter; one element is expanded so that a long cache costs no memory on a real device.
    shapes = kv.key_shapes + kv.value_shapes
    caches = tuple(torch.empty(shape, dtype=torch_dtype(kv.dtype), device="meta") for shape in shapes)
    if device.type != "meta":
        caches = tuple(torch.empty(1, dtype=c.dtype, device=device).expand(c.shape) for c in caches)
    names = tuple(f"kv.{part}.{i}" for part in ("key", "value") for i in range(kv.layers))
    states = tuple(torch.zeros(one.spec.shape, dtype=torch_dtype(one.spec.dtype), device=device) for one in held.states)
    names += tuple(one.source for one in held.states)
    return (ids, position, history, *caches, *states), ("session.ids", "session.position", "session.history", *names)


def _step(kv: KVSpec, device: torch.device, held: Held) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    state, names = _state(kv, device, held)
    return ((*state, torch.zeros(1, dtype=torch.int64, device=device)), (*names, OFFSET)) if held.offset else (state, names)


def given_to(kv: KVSpec, tokens: int, device: torch.device, held: Held) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """Arguments of a chunk of ``tokens`` on ``device`` and their names; of 0 tokens: of the decode step."""
    return _chunk(kv, tokens, device, held) if tokens else _step(kv, device, held)


def _chunk(kv: KVSpec, tokens: int, device: torch.device, held: Held) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    state, names = _state(kv, device, held)
    prompt = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    start = torch.zeros(1, dtype=torch.int64, device=device)
    length = torch.ones(1, dtype=torch.int64, device=device)
    return (prompt, start, length, *state), ("prompt", "start", "length", *names)


def _export(step: _Step, arguments: tuple[Tensor, ...], names: tuple[str, ...]) -> Exported:
    with _as_traced(step):
        program = _traced(step, arguments)
    return Exported(program, names, step.model)


@contextmanager
def _as_traced(step: _Step) -> Iterator[None]:
    """The model of ``step`` as every look at its calls finds it: quiet, evaluating, with operators of ours in their places."""
    model = step.model
    with (
        quiet(), evaluating(step), torch.no_grad(),
        _attention_implementation(model), semantic_experts(model), semantic_rotary(model), triangles_solved(model),
        semantic_recurrences(model),
    ):
        yield


def _traced(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any] | None = None) -> torch.export.ExportedProgram:
    with without_what_nobody_reads():
        return torch.export.export(module, args, keywords, strict=False)


@contextmanager
def _attention_implementation(model: nn.Module) -> Iterator[None]:
    """Switch the model, and every part with a configuration of its own, to our attention function and back."""
    found: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = IMPLEMENTATION
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


@contextmanager
def quiet() -> Iterator[None]:
    """torch.export and transformers log each refusal at length; the refusal is reported once, by us."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        sink = io.StringIO()  # it prints the graph so far, too
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
