"""The interpreter runs what a Graph says, nothing else, and forgets what it no longer needs."""

import gc
import weakref

import pytest
import torch

from agentcompile_core.errors import UsageError
from agentcompile_core.ir.graph import DType, Graph, GraphKind, Node, Ref, Symbol, TensorSpec, Value, ValueKind
from agentcompile_core.ops.interpreter import compile_nodes, resolve_symbol
from agentcompile_core.ops.overloads import operator_of


def value(name: str, shape: tuple[int, ...] = (4,), kind: ValueKind = ValueKind.INTERMEDIATE, dtype: DType = DType.F32) -> Value:
    return Value(name=name, spec=TensorSpec(shape=shape, dtype=dtype), kind=kind)


def node(name: str, op: str, *args: object, outputs: tuple[str, ...] | None = None, **more: object) -> Node:
    mutates = more.pop("mutates", ())
    return Node(
        name=name, op=op, kind=name, args=args, outputs=(name,) if outputs is None else outputs, mutates=mutates,  # type: ignore[arg-type]
        kwargs=tuple(more.items()),  # type: ignore[arg-type]
    )


def graph(values: list[Value], nodes: list[Node], outputs: tuple[str, ...]) -> Graph:
    made = {out for n in nodes for out in n.outputs}
    inputs = tuple(v.name for v in values if v.kind is ValueKind.INPUT)
    known = {v.name for v in values}
    values = values + [value(name) for name in sorted(made - known)]
    return Graph(name="g", kind=GraphKind.FORWARD, values=tuple(values), nodes=tuple(nodes), inputs=inputs, outputs=outputs).verify()


X = value("x", kind=ValueKind.INPUT)


def chain_of_three() -> Graph:
    """c = abs(exp(neg(x)))"""
    nodes = [node("a", "aten.neg.default", Ref("x")), node("b", "aten.exp.default", Ref("a")), node("c", "aten.abs.default", Ref("b"))]
    return graph([X], nodes, ("c",))


def test_chain_with_lists_and_several_results() -> None:
    g = graph(
        [X], [
            node("parts", "aten.split.Tensor", Ref("x"), 2, outputs=("low", "high")),
            node("joined", "aten.cat.default", (Ref("high"), Ref("low"))),
            node("most", "aten.max.dim", Ref("joined"), 0, outputs=("top", "where")),
        ], ("joined", "top", "where"),
    )
    found = compile_nodes(g, device="cpu").run({"x": torch.tensor([1.0, 2.0, 3.0, 0.0])})
    assert found["joined"].tolist() == [3.0, 0.0, 1.0, 2.0] and found["top"].item() == 3.0 and found["where"].item() == 0


def test_some_nodes_return_what_others_read() -> None:
    g = chain_of_three()
    assert set(compile_nodes(g, ["a", "b"], device="cpu").run({"x": torch.ones(4)})) == {"b"}
    torch.testing.assert_close(compile_nodes(g, ["c"], device="cpu").run({"b": -torch.ones(4)})["c"], torch.ones(4))


def test_missing_value_is_named() -> None:
    g = graph([X], [node("a", "aten.neg.default", Ref("x"))], ("a",))
    with pytest.raises(UsageError, match="lacks x"):
        compile_nodes(g, device="cpu").run({})


FOREIGN = [
    "os.system.default", "torch.load.default", "aten.no_such.default", "aten.add.NoSuch", "aten",
    "profiler._record_function_enter.default",
]


@pytest.mark.parametrize("op", FOREIGN)
def test_other_operators_are_refused(op: str) -> None:
    with pytest.raises(UsageError, match="operator"):
        operator_of(op)


def test_symbols() -> None:
    assert resolve_symbol(Symbol("device", "model"), "meta").type == "meta"
    assert resolve_symbol(Symbol("float", "-inf"), "cpu") == float("-inf")
    assert resolve_symbol(Symbol("dtype", "float16"), "cpu", torch.float64) is torch.float64
    assert resolve_symbol(Symbol("dtype", "int64"), "cpu", torch.float64) is torch.int64
    assert resolve_symbol(Symbol("memory_format", "contiguous_format"), "cpu") is torch.contiguous_format
    for kind, name in (("dtype", "nn"), ("dtype", "load"), ("float", "1"), ("module", "os")):
        with pytest.raises(UsageError, match="unknown"):
            resolve_symbol(Symbol(kind, name), "cpu")


def test_float64_mode_promotes_tensors_and_types() -> None:
    half = value("x", kind=ValueKind.INPUT, dtype=DType.F16)
    g = graph([half], [
        node("wide", "aten.to.dtype", Ref("x"), Symbol("dtype", "float32")),
        node("third", "aten.div.Tensor", Ref("wide"), 3.0),
        node("back", "aten.to.dtype", Ref("third"), Symbol("dtype", "float16")),
    ], ("back",))
    x = torch.tensor([1.0, 2.0, 5.0, 7.0], dtype=torch.float16)
    back = compile_nodes(g, device="cpu", dtype_override=torch.float64).run({"x": x})["back"]
    assert back.dtype is torch.float64 and torch.equal(back, x.double() / 3.0)


def test_float64_mode_returns_changed_states_and_leaves_the_given_ones() -> None:
    state = value("s", kind=ValueKind.STATE)
    g = graph([X, state], [node("grow", "aten.add_.Tensor", Ref("s"), Ref("x"), mutates=("s",))], ("grow",))
    s = torch.zeros(4)
    found = compile_nodes(g, device="cpu", dtype_override=torch.float64).run({"x": torch.ones(4), "s": s})
    assert found["s"].dtype is torch.float64 and found["s"].tolist() == [1.0] * 4 and s.tolist() == [0.0] * 4


def test_bound_run_writes_states_in_place_and_can_be_repeated() -> None:
    state = value("s", kind=ValueKind.STATE)
    grow = node("grow", "aten.add_.Tensor", Ref("s"), Ref("x"), mutates=("s",))
    g = graph([X, state], [grow, node("out", "aten.neg.default", Ref("s"))], ("out",))
    s = torch.zeros(4)
    run = compile_nodes(g, device="cpu").bind({"x": torch.ones(4), "s": s})
    run()
    assert run()[0].tolist() == [-2.0] * 4 and s.tolist() == [2.0] * 4


def test_intermediates_are_freed_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = compile_nodes(chain_of_three(), device="cpu")
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []
    for call in prepared._calls:
        original = call.operator

        def watched(*args: torch.Tensor, original=original, **kwargs: object) -> torch.Tensor:  # type: ignore[no-untyped-def]
            gc.collect()
            alive.append([ref() is not None for ref in seen])
            result = original(*args, **kwargs)
            seen.append(weakref.ref(result))
            return result

        call.operator = watched
    prepared.run({"x": torch.ones(4)})
    assert alive == [[], [True], [False, True]]


def test_gradients_are_never_recorded() -> None:
    g = graph([X], [node("a", "aten.exp.default", Ref("x"))], ("a",))
    assert not compile_nodes(g, device="cpu").run({"x": torch.ones(4, requires_grad=True)})["a"].requires_grad
