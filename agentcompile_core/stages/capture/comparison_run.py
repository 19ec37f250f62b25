"""A few tokens through a language model, twice: by its own forward and cache, and by its graphs, for comparison."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from ...ir.frequencies import near_of
from ...ir.graph import OFFSET, Graph, GraphKind, GraphSet, ValueKind
from ...ops.aliasing import memory_roots
from ...ops.dtypes import torch_dtype
from ...ops.interpreter import Prepared, compile_nodes
from ...ops.recurrence import padding_skipped
from .chunk_sizes import chunk_name
from .own_states import begun
from .states import cache_keyword

HALVES = (torch.float16, torch.bfloat16)
FIRST, SECOND, STEPS = 5, 4, 2  # tokens of the prompt's two chunks, and decode steps
SEED, LARGE, AHEAD = 7, 64.0, 3
HANDED_ON_SHARE, SEEN = 0.25, 1e-3  # how far off what a large state leaves may be, of itself and of a large number (Nemotron-H: 0.06)


@frozen(kw_only=True)
class Trial:
    """``tokens`` i64 [1, first + second + steps]: what is fed; ``chunks``: the sizes of prompt chunks to run it through, 0: none.

    ``at_once``: the model itself is given the whole prompt at once, since what it hands on between parts is what is tried. ``offset``: how
    much further than their rows in the cache the positions of steps are, as behind images.
    """

    tokens: Tensor
    first: int
    second: int
    steps: int
    chunks: tuple[int, ...]
    device: torch.device
    at_once: bool = False
    offset: int = 0

    def shortened(self) -> "Trial":
        """With one decode step: it reads all that a chunk has left. What steps leave for further ones is seen behind another chunk."""
        return evolve(self, tokens=self.tokens[:, : self.first + self.second + 1], steps=1) if self.steps > 1 else self


def plan(graphs: GraphSet, model: nn.Module, chunks: tuple[int, ...], draw: int = 0) -> tuple[Trial, ...]:
    """Random tokens that fit the context and every size of ``chunks``. Each ``draw`` has other tokens.

    Where chunks take no padding: two whole ones of the smallest size and steps, steps alone, and one of each other size, without steps:
    these are beginnings of one prompt, for the model's own forward of which a scan may take gigabytes and seconds.
    """
    context = _longest(graphs)
    if graphs.whole_chunks:
        smallest, *others = [chunk for chunk in chunks if chunk < context] or [0]
        handed = [(smallest, smallest if 2 * smallest < context else 0, (smallest,))] if smallest else []
        longest = _trial(graphs, model, draw, max(others, default=1), 0, (), steps=0)
        single = [evolve(longest, tokens=longest.tokens[:, :size], first=size, chunks=(size,)) for size in others]
        return (*(_trial(graphs, model, draw, *one) for one in (*handed, (1, 0, (0,)))), *single)
    total = min(context, FIRST + SECOND + STEPS)
    steps = min(STEPS, total - 1)
    padded = [size - 1 for size in chunks]  # what is made of padding is seen
    second = min((total - steps) * SECOND // (FIRST + SECOND), *padded) if chunks else 0
    first = min(total - steps - second, FIRST, *padded) if chunks else 1
    return (_trial(graphs, model, draw, first, second, chunks),)


def _longest(graphs: GraphSet) -> int:
    """Tokens of the longest trial: of the context, as far as all of it is turned by the frequencies that graphs are run with."""
    return min(graphs.workload.max_context, near_of(graphs.frequencies) or graphs.workload.max_context)


def _trial(graphs: GraphSet, model: nn.Module, draw: int, first: int, second: int, chunks: tuple[int, ...], *, steps: int = STEPS) -> Trial:
    steps, device = min(steps, _longest(graphs) - first - second), next(model.parameters()).device
    generator = torch.Generator().manual_seed(SEED + draw)
    tokens = torch.randint(graphs.model.vocab_size or 2, (1, first + second + steps), generator=generator).to(device)
    return Trial(tokens=tokens, first=first, second=second, steps=steps, chunks=chunks, device=device, at_once=bool(graphs.states),
                 offset=AHEAD if OFFSET in graphs.zeroed else 0)


def prompt_rows(model: nn.Module, trials: Sequence[Trial]) -> dict[int, Tensor]:
    """Logits [1, vocabulary] behind the prompt of each trial, by its tokens: all are beginnings of the longest, which the model reads."""
    if not trials:
        return {}
    longest = max(trials, key=lambda trial: trial.first)
    counts = "position_ids" in inspect.signature(model.forward).parameters
    positions = {"position_ids": torch.arange(longest.first, device=longest.device)[None]} if counts else {}
    logits = model(input_ids=longest.tokens, use_cache=True, **positions).logits[0]
    return {trial.first: logits[trial.first - 1][None].clone() for trial in trials}


def reference(model: nn.Module, trial: Trial) -> list[Tensor]:
    """Logits [vocabulary] after each part of the trial, by the model's own forward and cache."""
    keyword, rows = cache_keyword(model), []
    cache: Any = None
    ends = [trial.first - 1, trial.first + trial.second - 1][: 2 if trial.second else 1]
    prompt, *steps = trial.tokens.split([ends[-1] + 1, *[1] * trial.steps], dim=1)
    at, counts = 0, "position_ids" in inspect.signature(model.forward).parameters
    behind = ends[-1] + 1
    if trial.at_once:
        cache = begun(model, trial.tokens[:, :1])
    for part in (prompt, *steps) if trial.at_once else _parts(trial):
        # Who generates says where a part begins; not every model asks its cache, or counts from zero as generation does (RoBERTa).
        ahead = trial.offset if at >= behind else 0
        positions = {"position_ids": torch.arange(at + ahead, at + ahead + part.shape[1], device=trial.device)[None]} if counts else {}
        answer = model(input_ids=part, use_cache=True, **{keyword: cache}, **positions)
        cache, at = getattr(answer, keyword, cache), at + part.shape[1]
        rows += [answer.logits[0, end] for end in (ends if part is prompt else [-1])]
    return rows


def _parts(trial: Trial) -> list[Tensor]:
    sizes = [trial.first, *([trial.second] if trial.second else []), *[1] * trial.steps]
    return list(trial.tokens.split(sizes, dim=1))


class GraphRun:
    """One run of the graphs over state of its own. ``wrong_state`` says which part of the decode state they left wrong."""

    def __init__(self, graphs: GraphSet, tensors: dict[str, Tensor], device: torch.device, wide: torch.dtype | None,
                 prepared: dict[str, Prepared]) -> None:
        """``prepared`` collects the nodes of graphs by name, for further runs of the same graphs, type and device."""
        self.graphs, self.device, self.wide = graphs, device, wide
        self._prepared = prepared
        self.wrong_state = ""
        self.environment = {**tensors}

    def logits(self, trial: Trial, tokens: int, fresh: str = "_fresh") -> list[Tensor]:
        """Logits [vocabulary] after each part of the trial, the prompt in chunks of ``tokens``; ``fresh``: which graph begins."""
        self._allocate(trial)
        parts, at, rows = _parts(trial), 0, []
        names = [f"prefill_{tokens}{fresh}", *([f"prefill_{tokens}"] if trial.second else [])] if tokens else []
        for name, part in zip(names, parts, strict=False):
            graph = next((g for g in self.graphs.graphs if g.name == name), None) or self._called(f"prefill_{tokens}")
            rows.append(self._run(graph, self._chunk(graph, part, at)))
            at += part.shape[1]
            self._check(rows[-1], at)
        for part in parts[len(names):]:
            self.environment["session.ids"].copy_(part)
            self.environment[OFFSET].fill_(trial.offset if at >= trial.first + trial.second else 0)
            rows.append(self._run(self.graphs.of_kind(GraphKind.DECODE)[0], {}))
            at += 1
            self._check(rows[-1], at)
        return rows

    def handed_on(self, trial: Trial, tokens: int) -> str:
        """One clause on how a chunk of ``tokens`` answers to a large state otherwise than as many steps; empty where it does not.

        A chunk that forgets what it is handed, or decays it by too much, shows little of that in its last row. What a large state
        leaves in its layer is looked at, beside what zeros leave: what else differs between a model's own two ways, of prompts and of
        steps, is in both. The first layer will do, where nothing is magnified, and all layers are traced from the same code.
        """
        self._allocate(trial)
        first = [name for name in self.graphs.states if name.split(".")[2] == next(iter(self.graphs.states)).split(".")[2]]
        graph, part = self._called(chunk_name(tokens)), trial.tokens[:, :tokens]
        chunk, step = (self._writing(one, first) for one in (graph, self.graphs.of_kind(GraphKind.DECODE)[0]))

        def left(by_chunk: bool, large: str) -> Tensor:
            generator = torch.Generator().manual_seed(SEED)
            for name in first:
                self.environment[name].zero_()
            if large:
                self.environment[large].copy_(LARGE * torch.randn(self.environment[large].shape, generator=generator))
            if by_chunk:
                with padding_skipped():
                    chunk.bind({**self.environment, **self._chunk(graph, part, 0)})()
            for at, token in enumerate([] if by_chunk else part[0]):
                self.environment["session.ids"].fill_(token)
                self.environment["session.position"].fill_(at)
                step.bind(self.environment)()
            return torch.cat([self.environment[name].double().flatten() for name in first])

        for name in first:
            ours, wanted = (left(by_chunk, name) - left(by_chunk, "") for by_chunk in (True, False))
            if float((ours - wanted).norm()) > HANDED_ON_SHARE * float(wanted.norm()) + SEEN * LARGE:
                return f"a chunk of {tokens} tokens does not hand on {name} as {tokens} steps do"
        return ""

    def _writing(self, graph: Graph, states: list[str]) -> Prepared:
        """What ``graph`` does up to the writing of ``states``."""
        roots = memory_roots(graph)  # a view of what is wanted may be written
        kept, wanted = [], {roots[name] for name in states}
        for node in reversed(graph.nodes):
            if wanted.intersection(roots[name] for name in (*node.outputs, *node.mutates)):
                kept.append(node)
                wanted.update(roots[name] for name in node.inputs)
        return compile_nodes(graph, kept[::-1], device=self.device, dtype_override=self.wide)

    def _called(self, name: str) -> Graph:
        return next(g for g in self.graphs.graphs if g.name == name)

    def _run(self, graph: Graph, inputs: dict[str, Tensor]) -> Tensor:
        if graph.name not in self._prepared:
            self._prepared[graph.name] = compile_nodes(graph, device=self.device, dtype_override=self.wide)
        with padding_skipped():
            return self._prepared[graph.name].bind({**self.environment, **inputs})()[0][0, -1].clone()

    def _chunk(self, graph: Graph, part: Tensor, start: int) -> dict[str, Tensor]:
        prompt = torch.zeros(1, graph.tokens, dtype=torch.int64, device=self.device)
        prompt[:, : part.shape[1]] = part
        numbers = (torch.tensor([n], device=self.device) for n in (start, part.shape[1]))
        return dict(zip(graph.inputs, (prompt, *numbers), strict=True))

    def _check(self, row: Tensor, position: int) -> None:
        token = int(torch.ops.agentcompile.argmax.default(row.view(1, 1, -1)))
        state = self.environment
        for name, found, wanted in (
            ("token", int(state["session.ids"]), token), ("position", int(state["session.position"]), position),
            ("history", int(state["session.history"][position]), token),
        ):
            if found != wanted:
                self.wrong_state = self.wrong_state or f"the {name} after position {position - 1} is {found} instead of {wanted}"

    def _allocate(self, trial: Trial) -> None:
        """Session state; K and V only as long as this trial needs, where attention alone reads them."""
        from ...ops import operators as operators  # registers the operators of namespace agentcompile

        kv = self.graphs.kv
        assert kv is not None
        kv, dtype = evolve(kv, capacity=self._capacity(trial)), self.wide or torch_dtype(kv.dtype)
        for part, shapes in (("key", kv.key_shapes), ("value", kv.value_shapes)):
            for layer, shape in enumerate(shapes):
                self.environment[f"kv.{part}.{layer}"] = torch.zeros(shape, dtype=dtype, device=self.device)
        for name, spec in self.graphs.states.items():
            kept = torch_dtype(spec.dtype)
            self.environment[name] = torch.zeros(spec.shape, dtype=self.wide if self.wide and kept in HALVES else kept, device=self.device)
        for name, extent in (("ids", (1, 1)), ("position", (1,)), ("offset", (1,)), ("history", (kv.capacity + 1,))):
            self.environment[f"session.{name}"] = torch.zeros(extent, dtype=torch.int64, device=self.device)

    def _capacity(self, trial: Trial) -> int:
        assert self.graphs.kv is not None
        caches = [(g, v.name) for g in self.graphs.graphs for v in g.values if v.kind is ValueKind.STATE and v.source.startswith("kv.")]
        opaque = all(node.kind == "attention" for graph, name in caches for node in graph.users.get(name, ()))
        return trial.tokens.shape[1] if opaque else self.graphs.kv.capacity
