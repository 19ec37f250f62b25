"""Results that are an operand's own memory: known of every operator that a graph may call, and never given away twice."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import agentcompile_core as ac
from agentcompile_core.api import CompiledModel
from agentcompile_core.errors import UsageError
from agentcompile_core.ir.graph import Node, Ref
from agentcompile_core.ops.overloads import operator_of
from agentcompile_core.ops.schema import canonical, shared_arguments
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.store import Store

CATALOG = load_catalog(only=())
GUESSES: dict[str, tuple[Any, ...]] = {
    "Tensor": ("x",), "Optional[Tensor]": (None,), "List[Tensor]": (("x",),), "int": (1, 0), "List[int]": ((4, 4), (0,), (1,), (2, 2)),
    "float": (0.5,), "bool": (False,), "number": (1,), "str": ("ij->ij", "ij->ji", "mean"),
}


COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")


def operators() -> Iterator[str]:
    """Operators of aten that a graph may call, return tensors and are written in terms of others: kernels of their own make new memory."""
    names = {name for key in COMPOSITE for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
    for name in sorted(names):
        op = f"aten.{name[6:]}" if "." in name else f"aten.{name[6:]}.default"
        try:
            returns = operator_of(op)._schema.returns if name.startswith("aten::") else ()  # type: ignore[attr-defined]
        except UsageError:
            continue
        if returns and all("Tensor" in str(one.type) for one in returns):
            yield op


def calls(op: str) -> Iterator[tuple[Any, ...]]:
    """Guessed values of the arguments without a default; "x" stands for a tensor."""
    required = [a for a in operator_of(op)._schema.arguments if not a.has_default_value() and not a.kwarg_only]  # type: ignore[attr-defined]
    yield from itertools.islice(itertools.product(*(GUESSES.get(str(a.type), ()) for a in required)), 12)


def test_of_every_operator_it_is_known_whether_it_hands_memory_on() -> None:
    x, tried, handing, unknown = torch.rand(4, 4), set(), set(), set()
    for op in operators():
        if op.split(".")[1].endswith("_"):
            continue  # writes are declared
        for given in calls(op):
            try:
                found = operator_of(op)(*(x if one == "x" else [x] if one == ("x",) else one for one in given))
            except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
                continue
            tried.add(op)
            made = [t for t in pytree.tree_leaves(found) if isinstance(t, Tensor) and t.layout is torch.strided]
            if any(t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for t in made):
                handing.add(op)
                args = tuple(Ref("x") if one == "x" else (Ref("x"),) if one == ("x",) else one for one in given)
                node = canonical(Node(name="n", op=op, kind="k", args=args, outputs=("o",)))
                if not shared_arguments(node):
                    unknown.add(f"{op} {given}")
    assert len(tried) > 300 and len(handing) > 40 and not unknown


class Of(nn.Module):
    def __init__(self, call: Callable[[Tensor], Any], on: str) -> None:
        super().__init__()
        self.call, self.on, self.weight = call, on, nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        if self.on == "a weight":
            return self.call(self.weight), x + self.weight
        y = x * 1.5
        return self.call(y), y, self.call(y)


def compiled(module: nn.Module, *example: Any) -> CompiledModel:
    return ac.compile(module, example_inputs=example, device="cpu", store=Store(None), catalog=CATALOG)


@pytest.mark.parametrize("on", ["a weight", "another result"])
@pytest.mark.parametrize("call", [
    lambda x: torch.einsum("ij->ji", x), lambda x: x.sum_to_size(4, 4), torch.conj_physical, lambda x: torch.cartesian_prod(x[0]),
    lambda x: torch.unsafe_chunk(x, 2), lambda x: nn.functional.dropout(x, 0.5, False),
], ids=["einsum", "sum_to_size", "conj_physical", "cartesian_prod", "unsafe_chunk", "dropout"])
def test_a_result_may_be_written_to(call: Callable[[Tensor], Any], on: str) -> None:
    module, x = Of(call, on), torch.randn(4, 4)
    mine = compiled(module, x)
    found = [t for t in pytree.tree_leaves(mine(x)) if isinstance(t, Tensor)]
    wanted = [t.clone() for t in pytree.tree_leaves(module(x))]
    assert all(map(torch.equal, found, wanted))
    with torch.inference_mode():
        for result in found:
            others = [(t, t.clone()) for t in found if t is not result]
            result.fill_(-7.0)
            assert all(torch.equal(t, before) for t, before in others)
    assert all(map(torch.equal, pytree.tree_leaves(mine(x)), wanted))


@pytest.mark.parametrize("call", [lambda x: x.sum_to_size(4, 4), torch.conj_physical, lambda x: torch.einsum("ij->ij", x)])
def test_a_write_into_what_was_handed_on_is_a_write_to_the_argument(call: Callable[[Tensor], Tensor]) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return call(x).add_(1.0) * 2.0

    one, other = torch.randn(4, 4), torch.randn(4, 4)
    other.copy_(one)
    assert torch.equal(compiled(Writes(), torch.randn(4, 4))(one), Writes()(other)) and torch.equal(one, other)
