"""Layers of experts with their routers, of all kinds, and what an honest kernel of one gives: by a choice of its own among near scores."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from agentcompile_rules_transformers.draft import Draft
from attrs import evolve, frozen

from agentcompile_core.ir.graph import DType, Graph, Ref, Symbol
from agentcompile_core.ops.dtypes import torch_dtype
from agentcompile_core.ops.operator_names import EXPERT_LINEAR

SCORINGS = ("softmax", "softmax of the chosen", "sigmoid, biased", "groups", "hidden groups")
N, K, GROUP = 8, 16, 3  # columns of a result and of a row; experts of a group
ROUNDING = 2.0**-24


@frozen(kw_only=True)
class Choice:
    """``groups`` (none: there are none) and ``experts``, best first."""

    groups: torch.Tensor | None
    experts: torch.Tensor


@frozen(kw_only=True)
class Layer:
    """A graph whose first ``router`` nodes choose ``slots`` of ``experts``; the values that are chosen, weigh and come out."""

    scoring: str
    experts: int
    slots: int
    normalized: bool
    graph: Graph
    router: int
    chosen: str
    weights: str
    out: str
    groups: str = ""

    @property
    def taken(self) -> int:
        """How many groups are taken."""
        return -(-self.slots // GROUP)

    def drawn(self, generator: torch.Generator, gaps: str) -> dict[str, torch.Tensor]:
        """What the graph reads; logits ``equal`` many times, ``near`` to each other, or ``apart``."""
        made = {}
        for value in self.graph.values:
            if value.name in self.graph.producer:
                continue
            if value.name == "owner":
                made["owner"] = (torch.arange(self.experts) // GROUP)[:, None]
                continue
            drawn = torch.randn(value.spec.shape, generator=generator)
            if value.name in ("logits", "bias") and gaps != "apart":
                drawn = drawn.round() / 2
                nudge = torch.randint(-2, 3, drawn.shape, generator=generator) * ROUNDING
                drawn = drawn + nudge if gaps == "near" else drawn
            made[value.name] = (drawn * K**-0.5 if value.name == "matrices" else drawn).to(torch_dtype(value.spec.dtype))
        return made

    def scores(self, given: Mapping[str, torch.Tensor], generator: torch.Generator | None) -> torch.Tensor:
        """What experts are chosen by [experts], float32; with a ``generator``, rounded in a way of its own."""
        logits = given["logits"].double().flatten()
        if self.scoring == "softmax of the chosen":
            return logits.float()
        made = logits.sigmoid() if "sigmoid" in self.scoring else logits.softmax(-1)
        if generator is not None:
            made = made * (1.0 + ROUNDING * (2.0 * torch.rand(made.shape, generator=generator) - 1.0))
        return made.float()

    def chooses(self, given: Mapping[str, torch.Tensor], generator: torch.Generator, groups: torch.Tensor | None = None) -> Choice:
        """The best by these scores, any of equals; of ``groups`` if they are given."""
        scores = self.scores(given, generator)
        among = scores + given["bias"].float() if "bias" in given else scores
        if "groups" in self.scoring:
            if groups is None:
                groups = self.best(among.reshape(-1, GROUP).amax(-1), self.taken, generator)
            among = torch.where((torch.arange(self.experts)[:, None] // GROUP == groups).any(-1), among, 0.0)
        return Choice(groups=groups, experts=self.best(among, self.slots, generator))

    @staticmethod
    def best(scores: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
        """Where the best are, best first, of equals any."""
        order = torch.randperm(len(scores), generator=generator)
        return order[scores[order].argsort(descending=True, stable=True)[:count]]

    def gives(self, given: Mapping[str, torch.Tensor], choice: Choice) -> dict[str, torch.Tensor]:
        """What the layer makes by a choice, in float64 until it is stored."""
        scores = self.scores(given, None).double()[choice.experts]
        weights = scores.softmax(-1) if self.scoring == "softmax of the chosen" else scores
        weights = weights / weights.sum() if self.normalized else weights
        found = {self.chosen: choice.experts, self.weights: weights, self.out: self.rows(given, choice.experts)}
        if choice.groups is not None and self.groups:
            found[self.groups] = choice.groups
        return {name: tensor.reshape(self.graph.spec(name).shape).to(torch_dtype(self.graph.spec(name).dtype))
                for name, tensor in found.items()}

    @staticmethod
    def rows(given: Mapping[str, torch.Tensor], experts: torch.Tensor) -> torch.Tensor:
        """The rows of ``experts`` [.., N]."""
        gate, up = (given["matrices"][experts].double() @ given["x"].double().flatten()).chunk(2, -1)
        return F.silu(gate) * up


def layer(*, scoring: str, experts: int, slots: int, normalized: bool, dtype: DType) -> Layer:
    """A layer of about so many experts."""
    experts = -(-experts // GROUP) * GROUP
    draft, row, some = Draft(), (1, experts), (1, slots)
    made = draft.given("logits", row, dtype)
    wide = DType.F32
    groups = None
    if scoring == "softmax of the chosen":
        wide = dtype
    elif scoring == "sigmoid, biased":
        made = draft.one("aten.sigmoid.default", (draft.cast(made, row, wide) if dtype is not wide else made,), row, wide)
    else:
        made = draft.one("aten.softmax.int", (made, -1, Symbol("dtype", "float32")), row, wide)
    among = made
    if scoring == "sigmoid, biased":
        among = draft.one("aten.add.Tensor", (made, draft.weight("bias", experts, dtype=wide)), row, wide)
    if "groups" in scoring:
        among, groups = limited(draft, made, experts, -(-slots // GROUP))
    best, chosen = draft.call("aten.topk.default", (among, slots), some, some, dtype=wide)
    draft.retype(chosen, DType.I64)
    weights = draft.one("aten.gather.default", (made, 1, chosen), some, wide) if scoring == "sigmoid, biased" else best
    if scoring == "softmax of the chosen":
        weights = draft.one("aten.softmax.int", (weights, -1), some, wide)
    elif normalized:
        total = draft.one("aten.sum.dim_IntList", (weights, (-1,), True), (1, 1), wide)
        weights = draft.one("aten.div.Tensor", (weights, total), some, wide)
    router = len(draft.nodes)
    matrices, both = draft.weight("matrices", experts, 2 * N, K, dtype=dtype), (1, slots, 2 * N)
    rows = draft.one(EXPERT_LINEAR, (draft.given("x", (1, 1, K), dtype), matrices, chosen, None, False), both, dtype)
    gate, up = draft.apart("aten.chunk.default", (rows, 2, -1), (1, slots, N), (slots * 2 * N, 2 * N, 1), dtype, count=2)
    active = draft.one("aten.silu.default", (gate,), (1, slots, N), dtype)
    out = draft.one("aten.mul.Tensor", (active, up), (1, slots, N), dtype)
    told = (groups,) if groups is not None and scoring == "groups" else ()
    graph = draft.graph(out, weights, chosen, *told)
    divided = normalized and scoring != "softmax of the chosen"
    return Layer(scoring=scoring, experts=experts, slots=slots, normalized=divided, graph=graph, router=router, chosen=chosen.value,
                 weights=weights.value, out=out.value, groups=told[0].value if told else "")


def limited(draft: Draft, scores: Ref, experts: int, taken: int) -> tuple[Ref, Ref]:
    """Scores that are zero but in the ``taken`` groups with the largest ones, and those groups."""
    count = experts // GROUP
    parts = draft.one("aten.view.default", (scores, (1, count, GROUP)), (1, count, GROUP), DType.F32)
    largest = draft.one("aten.amax.default", (parts, (-1,)), (1, count), DType.F32)
    _, groups = draft.call("aten.topk.default", (largest, taken), (1, taken), (1, taken), dtype=DType.F32)
    draft.retype(groups, DType.I64)
    owner = draft.given("owner", (experts, 1), DType.I64)
    same = draft.cast(draft.one("aten.eq.Tensor", (owner, groups), (experts, taken), DType.BOOL), (experts, taken), DType.F32)
    mask = draft.one("aten.amax.default", (same, (-1,)), (experts,), DType.F32)
    return draft.one("aten.mul.Tensor", (scores, mask), (1, experts), DType.F32), groups


def with_expert(choice: Choice, slot: int, expert: int) -> Choice:
    """Another expert in one slot."""
    experts = choice.experts.clone()
    experts[slot] = expert
    return evolve(choice, experts=experts)
