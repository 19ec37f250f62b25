"""Kinds of matches: what a kind need not say, what a match must be, and that the core knows no kind."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from agentcompile_cuda_kit.targets import PRESETS
from agentcompile_rules_transformers import KINDS, agentcompile_region_rules
from agentcompile_rules_transformers import testing as cases
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from kind_cases import context

from agentcompile_core.ir import kind_names, serial
from agentcompile_core.ir.advice import Advice
from agentcompile_core.ir.graph import DType, TensorSpec
from agentcompile_core.ir.region import Access, Match, Operand, Role
from agentcompile_core.ir.verdict import Case, InputFamily, Outcome, Trial
from agentcompile_core.plugin.match_kind import WEIGHTS, MatchKind, OperandKind, plain_kind
from agentcompile_core.stages.analyze import analyze
from agentcompile_core.stages.analyze.checking import kind_problem
from agentcompile_core.worker.operands import make_inputs
from agentcompile_core.worker.synthetic import Synthetic
from agentcompile_core.worker.timing import roomy

ROOT = Path(__file__).parent.parent
CORE = {
    "linear": cases.linear_case(n=48, k=32, norm="layer", bias=True, residual=True), "gated": cases.gated_case(n=40, k=32),
    "norm": cases.norm_case(columns=64, residual=True), "gather": cases.gather_case(columns=8, vocabulary=9, rows=2),
    "elementwise": cases.elementwise_case(columns=16), "rope": cases.rope_case(heads=2, head_dim=16),
    "table": cases.rope_table_case(half=8),
    "attention": cases.attention_case(heads=(4, 2), head_dim=16, capacity=64, rope="rms", window=16),
    "argmax": cases.argmax_case(n=33, advance=True), "softmax": cases.softmax_case(shape=(3, 40), scale=2.0, mask=(40,)),
    "reduction": cases.reduction_case(shape=(3, 40), op="aten.max.dim"),
}
BY_NAME = {kind.name: kind for kind in KINDS}


def broken(match: Match, draw) -> Match:
    """The match with one thing wrong."""
    kind = BY_NAME[match.kind]
    operands, attributes = list(match.operands), list(match.attributes)
    how = draw(st.sampled_from(("missing", "unknown", "role", "twice", "attribute missing", "attribute unknown", "attribute type",
                                "label")))
    needed = [i for i, o in enumerate(operands) if not (kind.operand(o.name).optional or kind.operand(o.name).repeated)]
    at = draw(st.sampled_from(range(len(operands))))
    which = draw(st.sampled_from([i for i, (name, _) in enumerate(attributes) if name not in ("style", "unread_bytes")]))
    if how == "missing":
        del operands[draw(st.sampled_from(needed))]
    elif how == "unknown":
        operands[at] = evolve(operands[at], name="stranger")
    elif how == "role":
        wrong = [role for role in Role if role not in kind.operand(operands[at].name).roles]
        operands[at] = evolve(operands[at], role=draw(st.sampled_from(wrong)))
    elif how == "twice":
        operands.append(operands[at])
    elif how == "attribute missing":
        required = [i for i, (n, _) in enumerate(attributes) if kind.attribute(n).default is None and not kind.attribute(n).repeated]
        del attributes[draw(st.sampled_from(required))]
    elif how == "attribute unknown":
        attributes.append(("stranger", 1))
    elif how == "attribute type":
        attributes[which] = (attributes[which][0], (1.5,) if draw(st.booleans()) else None)
    else:
        return evolve(match, label="stranger")
    return evolve(match, operands=tuple(operands), attributes=tuple(attributes))


@given(name=st.sampled_from(sorted(CORE)), data=st.data())
def test_a_match_that_is_not_what_its_kind_says_is_refused(name, data):
    match, _ = CORE[name]
    assert kind_problem(match, BY_NAME[match.kind]) == ""
    assert kind_problem(broken(match, data.draw), BY_NAME[match.kind]) != ""


# ---- what a kind need not say


@pytest.mark.parametrize(("op", "given", "result", "flops", "axis"), [
    ("aten.linear.default", ((2, 8), (5, 8)), (2, 5), 2 * 2 * 5 * 8, -1),
    ("aten.addmm.default", ((5,), (2, 8), (8, 5)), (2, 5), 2 * 2 * 5 * 8 + 10, -1),
    ("aten.bmm.default", ((3, 2, 8), (3, 8, 5)), (3, 2, 5), 2 * 30 * 8, -1),
    ("aten.convolution.default", ((1, 3, 8, 8), (4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
     (1, 4, 6, 6), 2 * 144 * 27, -3),
    ("aten.sum.dim_IntList", ((4, 6), [0]), (6,), 24, -2),
    ("aten.cumsum.default", ((4, 6), 1), (4, 6), 24, -1),
    ("aten.tanh.default", ((4, 6),), (4, 6), 24, 0),
    ("aten.flip.default", ((4, 6), [0]), (4, 6), 0, 0),
    ("aten.atan2.default", ((4, 6), (4, 6)), (4, 6), 24, 0),
])
def test_work_is_counted_from_the_operators(op, given, result, flops, axis):
    draft = cases.Draft()
    literal = {i: tuple(s) if isinstance(s, list) else s for i, s in enumerate(given) if not isinstance(s, tuple)}
    args = tuple(literal[i] if i in literal else draft.given(f"x{i}", s, DType.F32) for i, s in enumerate(given))
    graph = draft.graph(draft.one(op, args, result, DType.F32))
    match = Match(kind="some", label="some", nodes=(graph.nodes[0].name,), operands=())
    kind = plain_kind("some")
    assert (kind.flops(match, graph), kind.reduction_axis(match, graph)) == (flops, axis)


def spec(*shape, dtype=DType.F32):
    return TensorSpec(shape=shape, dtype=dtype)


CACHE = MatchKind(name="cached", doc="", operands=(
    OperandKind("at", (Role.LENGTH,)), OperandKind("ids", (Role.INPUT,), index_of="table"), OperandKind("table", WEIGHTS),
    OperandKind("cache", (Role.STATE,), filled_along=1), OperandKind("log", (Role.STATE,), grows=True)))


def cached(capacity, rows):
    specs = (("at", Role.LENGTH, spec(1, dtype=DType.I64)), ("ids", Role.INPUT, spec(50, dtype=DType.I64)),
             ("table", Role.WEIGHT, spec(rows, 4)),
             ("cache", Role.STATE, spec(1, capacity, 2)), ("log", Role.STATE, spec(capacity, dtype=DType.I64)))
    return Match(kind="cached", label="cached", nodes=("n",), operands=tuple(
        Operand(name=n, role=r, access=Access.READ, values=(n,), spec=s) for n, r, s in specs))


@given(capacity=st.integers(2, 5000), rows=st.integers(1, 9), emulated=st.booleans(), seed=st.integers(0, 99))
def test_positions_indices_and_states_stay_inside_what_they_point_into(capacity, rows, emulated, seed):
    match = cached(capacity, rows)
    positions = CACHE.positions(match, emulated)
    assert all(0 <= p < capacity for p in positions) and {0, 1} <= set(positions)
    assert emulated or capacity - 1 in positions
    made = make_inputs(match, CACHE, Case(family="normal", seed=seed, position=positions[seed % len(positions)]), "cpu")
    at = int(made["at"])
    assert int(made["ids"].min()) >= 0 and int(made["ids"].max()) < rows
    assert not made["cache"][:, :at].isnan().any() and made["cache"][:, at:].isnan().all()
    without = evolve(match, operands=match.operands[1:])
    assert CACHE.positions(without, emulated) == (0,)


def test_states_that_grow_get_room_and_others_do_not():
    trial = roomy(Trial(match=cached(8, 2), graph=None, source=None, target=None, cases=()), CACHE)
    assert trial.match.need("log").spec.numel > 8 and trial.match.need("cache").spec.numel == 16


def test_weights_have_the_scale_of_trained_ones():
    match, _ = cases.linear_case(n=64, k=1024, norm="rms")
    made = make_inputs(match, BY_NAME["linear"], Case(family="normal", seed=3), "cpu")
    assert float(made["weight"].float().std()) == pytest.approx(1024**-0.5, rel=0.05)
    assert float(made["norm_weight"].float().mean()) == pytest.approx(1.0, abs=0.05)
    one_plus = evolve(match, attributes=tuple((n, "rms_one_plus" if n == "norm" else v) for n, v in match.attributes))
    assert float(make_inputs(one_plus, BY_NAME["linear"], Case(family="normal", seed=3), "cpu")["norm_weight"].float().mean()) < 0.5


def test_a_synthetic_step_asks_the_kinds(decode_graphs):
    _, graph = decode_graphs.transformer(layers=2)
    ctx = context()
    step = SimpleNamespace(graph=graph, regions=analyze(graph, ctx).regions, position=5)
    made = Synthetic(step, ctx.catalog.kinds, "cpu").tensors(tuple({v.kind for v in graph.values}), by_source=False)
    frequencies = next(t for name, t in made.items() if "inv_freq" in name)
    assert (frequencies > 0).all() and (frequencies.diff() < 0).all()
    grown = [name for name, tensor in made.items() if tensor.numel() > graph.spec(name).numel]
    assert len(grown) == 1 and "history" in grown[0]


# ---- the core knows no kind


def test_the_core_names_no_kind_outside_the_list_of_names():
    words = "|".join(value.upper() for name, value in vars(kind_names).items() if name.isupper())
    pattern = re.compile(rf"\bkind\s*(?:==|!=|in)\s*\(?(?:kinds?\.|kind_names\.)?(?:{words})\b|kind_names import")
    core = [p for p in (ROOT / "agentcompile_core").rglob("*.py") if p.name != "plugin_api.py"]  # which hands the names on
    assert len(core) > 100 and [str(p) for p in core if pattern.search(p.read_text())] == []


def test_every_rule_offers_the_kinds_that_it_finds(decode_graphs):
    _, graph = decode_graphs.transformer(layers=1, qk_norm=False, fused=True, bias=True)
    for rule in agentcompile_region_rules():
        found = {match.kind for match in rule.find(graph, PRESETS["h200"])}
        assert found <= {kind.name for kind in rule.kinds}
        assert all(kind.doc and all(o.roles for o in kind.operands) for kind in rule.kinds)


@pytest.mark.parametrize("text", ["", "Gemv", "a-b", "1st", "x" * 65, "two words"])
def test_words_of_open_vocabularies_are_lower_snake_case(text):
    for make in (lambda: Match(kind="k", label=text, nodes=("n",), operands=()), lambda: Case(family=text, seed=1),
                 lambda: Advice(label=text), lambda: MatchKind(name="k", doc="", operands=(), labels=(text,))):
        with pytest.raises(ValueError, match="lower_snake_case"):
            make()


def test_outcomes_are_as_before_in_json():
    match, _ = cases.norm_case(columns=8)
    assert serial.unstructure(match)["label"] == "norm" and serial.unstructure(Case(family=InputFamily.SPIKY, seed=1))["family"] == "spiky"
    assert serial.loads(serial.dumps(match), Match) == match and Outcome.PASS.value == "pass"
