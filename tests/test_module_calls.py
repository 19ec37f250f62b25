"""A compiled module is called as the module is, and returns what the module returns."""

import collections
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

import agentcompile_core as ac
from agentcompile_core.api import CompiledModel
from agentcompile_core.errors import UsageError
from agentcompile_core.ir import serial
from agentcompile_core.ir.graph import GraphSet
from agentcompile_core.runtime import calls
from agentcompile_core.runtime.framework_session import EagerModule
from agentcompile_core.runtime.module_session import ModuleSession
from agentcompile_core.store import Store

Pair = collections.namedtuple("Pair", "first second")
CONSTANTS = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=3))
LEAVES = st.one_of(st.integers(0, 3).map(lambda i: ("tensor", i)), CONSTANTS.map(lambda c: ("constant", c)))
SHAPES = st.recursive(LEAVES, lambda inner: st.one_of(
    st.lists(inner, max_size=3).map(lambda x: ("list", x)), st.lists(inner, max_size=3).map(lambda x: ("tuple", x)),
    st.dictionaries(st.one_of(st.text(max_size=2), st.integers(0, 3)), inner, max_size=3).map(lambda x: ("dict", x)),
    st.tuples(inner, inner).map(lambda x: ("pair", x))), max_leaves=6)


def made(shape: Any, tensors: list[Tensor]) -> Any:
    """The value of one generated shape over ``tensors``."""
    kind, what = shape
    if kind == "tensor":
        return tensors[what]
    if kind == "constant":
        return what
    if kind == "dict":
        return {key: made(item, tensors) for key, item in what.items()}
    items = [made(item, tensors) for item in what]
    return Pair(*items) if kind == "pair" else tuple(items) if kind == "tuple" else items


def alike(a: Any, b: Any) -> bool:
    """Whether two results are the same kind of thing with the same values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, atol=1e-5)
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


class Net(nn.Module):
    def __init__(self, give: Any) -> None:
        super().__init__()
        self.inner, self.give = nn.Linear(4, 4), give

    def forward(self, x: Tensor, scale: float = 2.0, extra: Any = None, *, flag: bool = True) -> Any:
        h = self.inner(x) * scale
        if extra is not None:
            h = h + extra["p"][0] - extra["q"] if flag else h
        return self.give(self, x, h)


def compiled(module: nn.Module, example_inputs: Any, **options: Any) -> CompiledModel:
    return ac.compile(module, example_inputs=example_inputs, device="cpu", run_on="framework", store=Store(None), validators=[],
                      origins=[], **options)


@settings(max_examples=200)
@given(SHAPES)
def test_every_structure_survives_being_written(shape: Any) -> None:
    tensors = [torch.full((2,), float(i)) for i in range(4)]
    value, found = made(shape, tensors), []
    tree = calls.tree_of(value, found)
    call = calls.Call({"tuple": [tree]}, {"dict": []}, tree, ("x",))
    again = calls.read(calls.written(call))
    assert again is not None and again == call
    assert alike(calls.rebuilt(again.outputs, found), value)
    placed = again.tensors((value,), {})
    assert len(placed) == len(found) and all(a is b for a, b in zip(placed, found, strict=True))


@settings(max_examples=8)
@given(SHAPES)
def test_a_compiled_module_returns_what_the_module_returns(shape: Any) -> None:
    module = Net(lambda self, x, h: made(("tuple", [shape, ("tensor", 0)]), [h, h.relu(), x, self.inner.weight]))
    mine, x = compiled(module, (torch.randn(3, 4),)), torch.randn(3, 4)
    assert isinstance(mine.session, ModuleSession), mine.notes
    assert alike(mine(x), module(x))


RESULTS: dict[str, Any] = {
    "tensor": lambda self, x, h: h, "twice": lambda self, x, h: (h, h), "input": lambda self, x, h: x,
    "output": lambda self, x, h: BaseModelOutput(last_hidden_state=h, hidden_states=(h, x)),
    "ordered": lambda self, x, h: collections.OrderedDict(z=h, y=None), "views": lambda self, x, h: (h.t(), h[0]),
}
ON_THE_FRAMEWORK = {
    "nothing": lambda self, x, h: None, "number": lambda self, x, h: (h, h.sum().item()),
    "default": lambda self, x, h: collections.defaultdict(list, z=h),
}


@pytest.mark.parametrize("name", [*RESULTS, *ON_THE_FRAMEWORK])
def test_results_of_every_kind(name: str) -> None:
    module = Net({**RESULTS, **ON_THE_FRAMEWORK}[name])
    mine, x = compiled(module, (torch.randn(3, 4),)), torch.randn(3, 4)
    assert isinstance(mine.session, ModuleSession if name in RESULTS else EagerModule)
    assert alike(mine(x), module(x)) and alike(mine(x=x), module(x))


def test_arguments_by_name_nested_and_plain() -> None:
    module = Net(RESULTS["tensor"])
    example = {"x": torch.randn(3, 4), "scale": 3, "extra": {"p": [torch.randn(4)], "q": torch.randn(4)}}
    mine, x, p, q = compiled(module, example), torch.randn(3, 4), torch.randn(4), torch.randn(4)
    assert isinstance(mine.session, ModuleSession)
    wanted = module(x, 3, {"p": [p], "q": q})
    assert alike(mine(x, 3, {"p": [p], "q": q}), wanted)
    assert alike(mine(extra={"q": q, "p": [p]}, scale=3, x=x, flag=True), wanted)
    extra = {"p": [p], "q": q}
    for args, keywords, words in (
        ((x,), {}, "argument scale is 2.0; the module was compiled for 3"), ((x, 3.0, extra), {}, "argument scale is 3.0"),
        ((x, 3, {"p": [p]}), {}, r"argument extra is a dict with the keys \['p'\]"),
        ((x, 3, {"p": [], "q": q}), {}, r"argument extra\['p'\]"),
        ((x, 3, extra), {"flag": False}, r"the call by name\['flag'\] is False"), ((), {}, "missing a required argument: 'x'"),
        ((x,), {"gain": 2}, "unexpected keyword argument 'gain'"), (("x", 3, extra), {}, "argument x is 'x'"),
        ((x[:2], 3, extra), {}, r"\(2, 4\).*compiled for \(3, 4\)"), ((x, 3, object()), {}, "argument extra is a builtins.object"),
    ):
        with pytest.raises(UsageError, match=words):
            mine(*args, **keywords)


def test_the_shape_of_the_call_is_in_the_bundle(tmp_path: Path) -> None:
    module = Net(lambda self, x, h: {"h": h, "n": 3, "o": BaseModelOutput(last_hidden_state=x)})
    mine = compiled(module, (torch.randn(3, 4),))
    graphs = serial.loads(serial.dumps(mine.graphs), GraphSet)
    assert graphs.call == mine.graphs.call != ""
    mine.save(tmp_path / "bundle")
    assert mine.graphs.call in serial.loads((tmp_path / "bundle" / "graphs.json").read_text(), GraphSet).call


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"args":{"tuple":3},"keywords":{"dict":[]},"outputs":{"tensor":0},"names":[]}',
                                  '{"args":{"tuple":[]},"keywords":{"dict":[]},"outputs":{"import":"os"},"names":[]}'])
def test_a_damaged_description_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="damaged"):
        calls.read(text)


def test_a_class_that_is_not_there_is_not_imported() -> None:
    import sys

    with pytest.raises(UsageError, match=r"this\.Zen, which is not imported"):
        calls.rebuilt({"class": "this.Zen", "context": None, "items": []}, [])
    assert "this" not in sys.modules
    with pytest.raises(UsageError, match=r"os\.system"):
        calls.rebuilt({"class": "os.system", "context": None, "items": [{"value": "true"}]}, [])


def test_infinite_numbers_are_kept() -> None:
    for number in (math.inf, -math.inf):
        assert calls.rebuilt(calls.tree_of(number, []), []) == number


def test_what_has_a_default_reaches_a_module_by_name() -> None:
    """As wrappers of transformers' forwards want it: they put in by name what was left out."""
    from agentcompile_core.runtime.calls import by_name, canonical

    class Wrapped(torch.nn.Module):
        def forward(self, x, /, y, mask=None, *, scale=2.0, **more):
            return x

    class Open(torch.nn.Module):
        def forward(self, x, *rest, scale=1.0):
            return x

    args, keywords = canonical(Wrapped(), (1, 2), {"other": 5})
    assert by_name(Wrapped(), args, keywords) == ((1, 2), {"mask": None, "scale": 2.0, "other": 5})
    assert list(by_name(Wrapped(), (1, 2, 3), {"scale": 4})[1]) == ["mask", "scale"]
    assert by_name(Open(), (1, 2, 3), {"scale": 4}) == ((1, 2, 3), {"scale": 4})
    assert by_name(Open(), (1,), {"scale": 4}) == ((1,), {"scale": 4})


class Shapes(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.shape, x * 2, {"size": x.size(), "pair": (3, [x.shape[0]])}


def test_a_returned_shape_stays_one() -> None:
    x = torch.ones(2, 3)
    mine = ac.compile(Shapes().eval(), example_inputs=(x,), device="cpu", run_on="framework", origins=[], validators=(), store=Store(None))
    (shape, doubled, more), wanted = mine(x), Shapes()(x)
    assert (shape, more) == (wanted[0], wanted[2]) and torch.equal(doubled, wanted[1]) and shape.numel() == 6
    assert type(shape) is type(more["size"]) is torch.Size and type(more["pair"]) is tuple
