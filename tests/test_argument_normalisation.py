"""Arguments of nodes: one form by the operator's schema, and every reader of them understands each spelling alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import PRESETS
from agentcompile_rules_transformers.elementwise import ElementwiseRule
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.configuration import Config
from agentcompile_core.errors import AgentCompileError, VerificationError
from agentcompile_core.ir.expression import Expression, PointwiseKind
from agentcompile_core.ir.graph import DType as D
from agentcompile_core.ir.graph import Graph, GraphKind, GraphSet, ModelInfo, Node, Ref, Workload
from agentcompile_core.ir.region import Match
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.overloads import operator_of
from agentcompile_core.ops.reference import oracle
from agentcompile_core.ops.reference.second_opinion import disagreement, in_float64
from agentcompile_core.ops.schema import argument, canonical, parameters, verify_canonical, with_argument
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.stages.capture.export import export_forward
from agentcompile_core.stages.capture.importer import import_program
from agentcompile_core.stages.capture.normalize import normalize
from agentcompile_core.store import Store

SHAPE = (4, 16)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
K = PointwiseKind
EVALUATE: dict[PointwiseKind, Callable[..., Tensor]] = {
    K.ADD: torch.add, K.SUB: torch.sub, K.MUL: torch.mul, K.DIV: torch.div, K.NEG: torch.neg, K.SILU: nn.functional.silu,
    K.GELU: nn.functional.gelu, K.GELU_TANH: lambda x: nn.functional.gelu(x, approximate="tanh"), K.RELU: torch.relu,
    K.SIGMOID: torch.sigmoid, K.TANH: torch.tanh, K.EXP: torch.exp, K.RSQRT: torch.rsqrt, K.ROUND: lambda x: x,
    K.MIN: torch.minimum, K.MAX: torch.maximum, K.GREATER: lambda a, b: (a > b).to(a.dtype),
    K.WHERE: lambda c, a, b: torch.where(c != 0, a, b),
}


class Steps(nn.Module):
    """Applies calls one after the other: each gets what came before, and a second tensor."""

    def __init__(self, *steps: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x, y)
        return x


def captured(module: nn.Module, *inputs: Tensor) -> Graph:
    graph = normalize(import_program(export_forward(module, inputs), "forward", GraphKind.FORWARD))
    verify_canonical(graph_set(graph))
    return graph


def graph_set(graph: Graph) -> GraphSet:
    info = ModelInfo(name="m", model_type="m", config_json="{}", digest="d", parameter_bytes=0)
    return GraphSet(model=info, workload=Workload(dtype=D.F32, max_context=8), graphs=(graph,))


def operands(dtype: torch.dtype = torch.float32, other: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(*SHAPE, generator=generator) for _ in range(2))
    return x.to(dtype), (y.abs() + 0.5).to(other or dtype)


def named_inputs(graph: Graph, *inputs: Tensor) -> dict[str, Tensor]:
    return dict(zip((f"input.{i}" for i in range(len(inputs))), inputs, strict=True))


def evaluated(expression: Expression, inputs: list[Tensor]) -> Tensor:
    """An expression over its arguments in order, with everything in the type of ``inputs``."""
    named = dict(zip(expression.arguments, inputs, strict=True))
    done: list[Tensor] = []
    for operation in expression.operations:
        values = [named[o] if isinstance(o, str) else done[o] if type(o) is int else torch.tensor(o, dtype=inputs[0].dtype)
                  for o in operation.operands]
        done.append(EVALUATE[operation.kind](*values))
    return done[-1] if done else inputs[0]


def elementwise_matches(graph: Graph) -> list[Match]:
    return list(ElementwiseRule().find(graph, PRESETS["h200"]))


aten = torch.ops.aten
# (name, call, whether an elementwise kernel may compute it, whether the reference has a rule for it)
CALLS: tuple[tuple[str, Callable[[Tensor, Tensor], Tensor], bool, bool], ...] = (
    ("rsub alpha", lambda x, y: torch.rsub(x, 3, alpha=2), True, True),
    ("add.Scalar alpha", lambda x, y: aten.add.Scalar(x, 3, 2), True, True),
    ("sub.Scalar alpha", lambda x, y: aten.sub.Scalar(x, 3, 0.5), True, True),
    ("rsub.Scalar alpha", lambda x, y: aten.rsub.Scalar(x, 3, 2), True, True),
    ("rsub.Tensor alpha", lambda x, y: torch.rsub(x, y, alpha=-1.5), True, True),
    ("add alpha", lambda x, y: torch.add(x, y, alpha=2), True, True),
    ("add number alpha", lambda x, y: torch.add(x, 3, alpha=2), True, True),
    ("sub alpha", lambda x, y: torch.sub(x, y, alpha=0.25), True, True),
    ("add alpha one", lambda x, y: torch.add(x, y, alpha=1), True, True),
    ("add alpha float one", lambda x, y: torch.add(x, y, alpha=1.0), True, True),
    ("add.Scalar alpha one", lambda x, y: aten.add.Scalar(x, 3, 1), True, True),
    ("add", lambda x, y: x + y, True, True),
    ("add number", lambda x, y: x + 3, True, True),
    ("sub", lambda x, y: x - y, True, True),
    ("rsub", lambda x, y: 3 - x, True, True),
    ("rsub.Tensor", lambda x, y: torch.rsub(x, y), True, True),
    ("mul", lambda x, y: x * y, True, True),
    ("mul.Scalar", lambda x, y: aten.mul.Scalar(x, -0.75), True, True),
    ("multiply", lambda x, y: torch.multiply(x, y), True, True),
    ("div", lambda x, y: x / y, True, True),
    ("div.Scalar", lambda x, y: aten.div.Scalar(x, 3), True, True),
    ("divide", lambda x, y: torch.divide(x, y), True, True),
    ("div floor", lambda x, y: torch.div(x, y, rounding_mode="floor"), False, False),
    ("div trunc", lambda x, y: torch.div(x, 0.3, rounding_mode="trunc"), False, False),
    ("divide floor", lambda x, y: torch.divide(x, y, rounding_mode="floor"), False, False),
    ("div no mode", lambda x, y: torch.div(x, y, rounding_mode=None), True, True),
    ("floor_divide", lambda x, y: x // y, False, False),
    ("remainder", lambda x, y: x % y, False, False),
    ("gelu", lambda x, y: nn.functional.gelu(x), True, True),
    ("gelu none", lambda x, y: nn.functional.gelu(x, approximate="none"), True, True),
    ("gelu tanh", lambda x, y: nn.functional.gelu(x, approximate="tanh"), True, True),
    ("pow 2", lambda x, y: x**2, True, True),
    ("pow 2.0", lambda x, y: x**2.0, True, True),
    ("pow 3", lambda x, y: x**3, True, True),
    ("pow 4", lambda x, y: x**4, False, True),
    ("number to the power", lambda x, y: 2**x, False, False),
    ("pow tensor", lambda x, y: y**x, False, False),
    ("square", lambda x, y: x.square(), True, True),
    ("neg", lambda x, y: -x, True, True),
    ("silu", lambda x, y: nn.functional.silu(x), True, True),
    ("sigmoid", lambda x, y: x.sigmoid(), True, True),
    ("tanh", lambda x, y: x.tanh(), True, True),
    ("relu", lambda x, y: x.relu(), True, True),
    ("exp", lambda x, y: x.exp(), True, True),
    ("rsqrt", lambda x, y: y.rsqrt(), True, True),
    ("clamp", lambda x, y: x.clamp(-0.5, 0.5), True, True),
    ("leaky relu", lambda x, y: nn.functional.leaky_relu(x, 0.2), True, True),
    ("cut to integers", lambda x, y: (x * 4).to(torch.int32) + y, False, True),
    ("softmax", lambda x, y: x.softmax(0), False, True),
    ("softmax wide", lambda x, y: torch.softmax(x, -1, dtype=torch.float32), False, True),
    ("mean wide", lambda x, y: x.mean(0, dtype=torch.float32) + y, False, True),
    ("mean of all", lambda x, y: x.mean() * y, False, True),
    ("mean of no axes", lambda x, y: x.mean(dim=[]) * y, False, True),
    ("sum of two axes", lambda x, y: x.sum((0, 1), keepdim=True) + y, False, True),
    ("layer norm, two axes", lambda x, y: nn.functional.layer_norm(x, SHAPE), False, False),
    ("layer norm", lambda x, y: nn.functional.layer_norm(x, SHAPE[1:], eps=0.1), False, True),
    ("addmm beta alpha", lambda x, y: torch.addmm(y[:, :4], x, y.t(), beta=0.5, alpha=2), False, False),
    ("masked fill", lambda x, y: x.masked_fill(y > 1, 0.5), True, True),
)


@pytest.mark.parametrize(("call", "matched", "ruled"), [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_every_reader_understands_a_call_or_leaves_it_alone(call: Callable[..., Tensor], matched: bool, ruled: bool) -> None:
    x, y = operands()
    module = Steps(call)
    graph = captured(module, x, y)
    values = named_inputs(graph, x, y)
    eager = call(x, y)
    (out,) = graph.outputs
    assert torch.equal(compile_nodes(graph, device="cpu").run(values)[out], eager)
    if ruled:
        assert disagreement(graph, values, oracle(graph, values)) == ""
        assert ((oracle(graph, values)[out].value - eager.double()).abs() <= 1e-5 * (1 + eager.double().abs())).all()
    whole = [m for m in elementwise_matches(graph) if len(m.nodes) == len(graph.nodes)]
    assert bool(whole) is matched
    for match in whole:
        assert torch.allclose(_of_match(match, graph, values), call(x.double(), y.double()), rtol=1e-12, atol=1e-12)


def _of_match(match: Match, graph: Graph, values: dict[str, Tensor]) -> Tensor:
    assert match.epilogue is not None
    given = [values[o.values[0]].double() for o in match.operands if o.name != "out"]
    return evaluated(match.epilogue, given)


def test_an_operator_without_a_rule_is_refused_in_words() -> None:
    x, y = operands()
    graph = captured(Steps(lambda a, b: torch.div(a, b, rounding_mode="floor")), x, y)
    with pytest.raises(AgentCompileError, match=r"div\.Tensor_mode with rounding_mode='floor'"):
        oracle(graph, named_inputs(graph, x, y))


scalars = st.sampled_from([-2, -0.75, 1, 2, 3.5])
alphas = st.sampled_from([1, 1.0, 2, -0.5])


@st.composite
def steps(draw: st.DrawFn) -> Callable[[Tensor, Tensor], Tensor]:
    """One call of a pointwise overload, spelled in one of its ways."""
    s, alpha = draw(scalars), draw(alphas)
    choice = draw(st.sampled_from([
        lambda x, y: torch.add(x, y, alpha=alpha), lambda x, y: torch.add(x, s, alpha=alpha), lambda x, y: aten.add.Scalar(x, s, alpha),
        lambda x, y: torch.sub(x, y, alpha=alpha), lambda x, y: torch.sub(x, s, alpha=alpha), lambda x, y: aten.sub.Scalar(x, s, alpha),
        lambda x, y: torch.rsub(x, y, alpha=alpha), lambda x, y: torch.rsub(x, s, alpha=alpha), lambda x, y: s - x, lambda x, y: y - x,
        lambda x, y: x * y, lambda x, y: x * s, lambda x, y: aten.mul.Scalar(x, s), lambda x, y: torch.multiply(x, s),
        lambda x, y: x / y, lambda x, y: x / s, lambda x, y: torch.div(x, y, rounding_mode=None), lambda x, y: torch.divide(x, s),
        lambda x, y: nn.functional.gelu(x), lambda x, y: nn.functional.gelu(x, approximate="tanh"), lambda x, y: x**2,
        lambda x, y: x.square(), lambda x, y: -x, lambda x, y: x.sigmoid(), lambda x, y: x.tanh(), lambda x, y: x.relu(),
        lambda x, y: nn.functional.silu(x), lambda x, y: x.to(y.dtype), lambda x, y: x.type_as(y),
        lambda x, y: x[:, :1] * y, lambda x, y: x[0] + y, lambda x, y: x.mean(-1, keepdim=True) + y, lambda x, y: x.reshape(*SHAPE) * y,
    ]))
    return choice


@given(chain=st.lists(steps(), min_size=1, max_size=5), dtype=st.sampled_from(DTYPES), other=st.sampled_from(DTYPES))
@settings(max_examples=60)
def test_chains_mean_to_the_graph_the_reference_and_the_rule_what_they_mean_to_torch(
    chain: list[Callable[..., Tensor]], dtype: torch.dtype, other: torch.dtype
) -> None:
    x, y = operands(dtype, other)
    module = Steps(*chain)
    graph = captured(module, x, y)
    values = named_inputs(graph, x, y)
    (out,) = graph.outputs
    eager = module(x, y)
    found = compile_nodes(graph, device="cpu").run(values)[out]
    assert found.dtype is eager.dtype and torch.equal(found.nan_to_num(), eager.nan_to_num())
    wide = in_float64(graph, values)[out]
    assert torch.allclose(wide, module(x.double(), y.double()), rtol=1e-9, atol=1e-9)
    assert disagreement(graph, values, oracle(graph, values)) == ""
    for match in elementwise_matches(graph):
        part = graph.sub(match.nodes, match.id, match.need("out").values)
        env = in_float64(evolve(graph, outputs=part.inputs), values) | {name: v.double() for name, v in values.items()}
        got = _of_match(match, part, env)
        want = in_float64(part, {name: env[name] for name in part.inputs})[match.need("out").values[0]]
        assert torch.allclose(got.expand(want.shape), want, rtol=1e-9, atol=1e-9), match.epilogue


SPELLED = ("aten.add.Tensor", "aten.add.Scalar", "aten.rsub.Scalar", "aten.mean.dim", "aten.sum.dim_IntList", "aten.gelu.default",
           "aten.slice.Tensor", "aten.softmax.int", "aten.layer_norm.default", "aten.split.Tensor", "aten.div.Tensor_mode",
           "agentcompile.rms_norm.default", "aten.addmm.default")
VALUES: dict[str, Any] = {
    "self": Ref("x"), "input": Ref("x"), "x": Ref("x"), "mat1": Ref("x"), "mat2": Ref("w"), "weight": Ref("g"), "bias": Ref("g"),
    "dim": 1, "keepdim": True, "alpha": 2, "beta": 3, "approximate": "tanh", "start": 2, "end": 8, "step": 2, "split_size": 4,
    "normalized_shape": (16,), "eps": 1, "one_plus": True, "rounding_mode": "floor", "dtype": None, "cudnn_enable": False,
}


@given(op=st.sampled_from(SPELLED), data=st.data())
def test_all_spellings_of_a_call_have_one_form_and_one_result(op: str, data: st.DataObject) -> None:
    tensors = {"x": torch.randn(16, 16), "w": torch.randn(16, 16), "g": torch.randn(16)}
    known = parameters(op)
    given_values = {p.name: VALUES.get(p.name, 3) for p in known if p.default is not None or data.draw(st.booleans()) or p.name == "self"}
    for p in known:  # some are left out, some are given as their defaults
        spelled = data.draw(st.sampled_from(["value", "default", "absent"]))
        if isinstance(p.default, type(None) | bool | int | float | str) and spelled != "value":
            given_values.pop(p.name, None)
            if spelled == "default":
                given_values[p.name] = p.default
    if op == "aten.addmm.default":
        given_values["self"] = Ref("x")
    count = 0
    positional = [p for p in known if not p.keyword_only]
    while count < len(positional) and positional[count].name in given_values:
        count += 1
    split = data.draw(st.integers(min(1, count), count))
    forms = []
    for cut in (split, count):
        args = tuple(given_values[p.name] for p in positional[:cut])
        kwargs = tuple((k, v) for k, v in reversed(given_values.items()) if k not in [p.name for p in positional[:cut]])
        try:
            forms.append(canonical(Node(name="n", op=op, kind="k", args=args, kwargs=kwargs, outputs=("o",))))
        except VerificationError as exc:
            assert "lacks" in str(exc)
            return
    assert forms[0] == forms[1] and canonical(forms[0]) == forms[0]
    real = {k: tensors[v.value] if isinstance(v, Ref) else list(v) if isinstance(v, tuple) else v for k, v in given_values.items()}
    node = forms[0]
    run_args = [tensors[a.value] if isinstance(a, Ref) else list(a) if isinstance(a, tuple) else a for a in node.args]
    first = positional[0].name
    want = operator_of(op)(real.pop(first), **real)
    got = operator_of(op)(*run_args, **{k: tensors[v.value] if isinstance(v, Ref) else v for k, v in node.kwargs})
    same = [want] if isinstance(want, Tensor) else want
    assert all(torch.equal(a, b) for a, b in zip(same, [got] if isinstance(got, Tensor) else got, strict=True))
    for p in known:
        if p.name in given_values:
            assert argument(node, p.name) == p.canonical(given_values[p.name])


def test_arguments_are_read_with_the_defaults_of_the_schema() -> None:
    node = canonical(Node(name="n", op="agentcompile.attention.default", kind="attention", args=tuple(Ref(c) for c in "qkvabp"),
                          kwargs=(("scale", 2), ("fresh", False)), outputs=("o",)))
    assert node.args[6:] == (2.0,) and node.kwargs == ()
    assert [argument(node, name) for name in ("window", "softcap", "sinks", "fresh")] == [0, 0.0, None, False]
    fresh = with_argument(node, "fresh", True)
    assert fresh.args[6:] == (2.0, 0, 0.0, None, True)
    with pytest.raises(VerificationError, match="no parameter 'colour'"):
        argument(node, "colour")


@pytest.mark.parametrize("change", [
    {"kwargs": (("alpha", 1),)}, {"args": (Ref("input.0"),), "kwargs": (("other", Ref("input.1")),)}, {"kwargs": (("colour", 1),)},
    {"args": (Ref("input.0"),)}, {"args": (Ref("input.0"), Ref("input.1"), 2)},
])
def test_graphs_with_other_forms_are_refused(change: dict[str, Any]) -> None:
    x, y = operands()
    graph = captured(Steps(lambda a, b: a + b), x, y)
    broken = evolve(graph, nodes=(evolve(graph.nodes[0], **change),))
    with pytest.raises(VerificationError, match=r"graph forward: .*node add"):
        verify_canonical(graph_set(broken))


class Mixed(nn.Module):
    """The two cases that were wrong, with others between them."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(torch.rsub(x, 3, alpha=2)) * 2
        x = torch.tanh(aten.add.Scalar(x, 3, 2))
        return torch.div(x, 0.25, rounding_mode="floor") - x * x


def test_compiled_modules_compute_what_torch_computes() -> None:
    x = torch.randn(1, 1, 64)
    catalog = load_catalog(only=("transformers_rules", "cuda", "elementwise", "emulation", "numerics"), strict=True)
    model = ac.compile(Mixed(), example_inputs=(x,), device="cpu", target="h200", catalog=catalog, store=Store(None), run_on="emulation",
                       config=Config(budget_plans=6, rounds=1, budget_s=60.0))
    out = model(x)
    assert torch.allclose(out, Mixed()(x), rtol=1e-5, atol=1e-5)
    assert model.compilation is not None and any(s.steps for s in model.compilation.selections), "no kernel ran"
