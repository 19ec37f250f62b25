"""Advice as JSON: the strict reader, the schema, what a question says and what it keeps to itself."""

import json
import time

import pytest
from advice_cases import MATCHES, PLAN, QUESTION, SPACE, asked, check_plan, record_of
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.errors import UsageError
from agentcompile_core.ir import serial
from agentcompile_core.ir.advice import Advice, AdviceRecord, Diagnosis, Hint, RejectedItem, Risk
from agentcompile_core.ir.region import SemanticLabel
from agentcompile_core.plugin.advice_json import MAX_BYTES, answer_schema, match_names, question_json, question_key, read_answer
from agentcompile_core.stages import advise
from agentcompile_core.stages.advise.advice_check import screen

FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def answer(**fields) -> str:
    return json.dumps({"label": None, "order": [], "cover_order": [], "hints": [], "risks": [], "diagnoses": [], **fields})


def test_a_good_answer_is_read_whole() -> None:
    hint = {"match": "m0", "implementation": "many/many", "parameter": "tile", "values": [17, 16]}
    advice = read_answer(answer(label="gated_mlp", order=["one/one"], cover_order=[1, 0], hints=[hint], risks=["cancellation"],
                                diagnoses=["latency_bound"]), SPACE)
    assert advice == Advice(
        label=SemanticLabel.GATED_MLP, order=("one/one",), cover_order=(1, 0), risks=(Risk.CANCELLATION,),
        hints=(Hint(match_id=MATCHES[0], implementation="many/many", parameter="tile", values=(17, 16)),),
        diagnoses=(Diagnosis.LATENCY_BOUND,))


HINT = {"match": "m0", "implementation": "many/many", "parameter": "tile", "values": [16]}


@pytest.mark.parametrize("fields,rule,item", [
    ({"code": "__global__ void f() {}"}, "J1", "code"),
    ({"order": "many/many"}, "J2", "order: str"),
    ({"order": [1]}, "J2", "1"),
    ({"cover_order": [True]}, "J2", "True"),
    ({"cover_order": ["0"]}, "J2", "0"),
    ({"hints": {"m0": 1}}, "J2", "hints: dict"),
    ({"hints": [{**HINT, "values": 16}]}, "J2", "values"),
    ({"hints": [{**HINT, "values": [[16]]}]}, "J2", "values"),
    ({"hints": [{"why": "it is fast", **HINT}]}, "J2", "why"),
    ({"hints": [{k: v for k, v in HINT.items() if k != "parameter"}]}, "J2", "many/many"),
    ({"hints": ["tile=16"]}, "J2", "tile=16"),
    ({"label": "fast"}, "J3", "fast"),
    ({"label": 3}, "J3", "3"),
    ({"risks": ["everything"]}, "J3", "everything"),
    ({"risks": [["cancellation"]]}, "J3", "cancellation"),
    ({"diagnoses": [None]}, "J3", "None"),
    ({"hints": [{**HINT, "match": "m99"}]}, "J4", "m99"),
    ({"hints": [{**HINT, "match": MATCHES[0]}]}, "J4", MATCHES[0][:20]),
])
def test_each_rule_of_the_reader(fields: dict, rule: str, item: str) -> None:
    advice = read_answer(answer(**fields), SPACE)
    assert [r.rule for r in advice.refused] == [rule] and item in advice.refused[0].item
    assert evolve(advice, refused=()) == Advice()
    accepted, refused = screen(advice, QUESTION)
    assert refused == advice.refused and accepted == Advice()


@pytest.mark.parametrize("text,message", [
    ("", "not JSON"), ("I would try tile 16.", "not JSON"), ("```json\n{}\n```", "not JSON"), ("[]", "must be a JSON object, got list"),
    ("null", "got NoneType"), ('{"order": [], "order": ["one/one"]}', "duplicate key"),
    ('{"hints": [{"match": "m0", "match": "m1"}]}', "duplicate key"), ('{"cover_order": [NaN]}', "NaN"),
    ('{"order": ' + "[" * 100 + "]" * 100 + "}", "nested deeper"), ('{"cover_order": [' + "9" * 5000 + "]}", "not JSON"),
    ('{"order": ["' + "x" * MAX_BYTES + '"]}', "at most"), ('{"order": []', "not JSON"),
])
def test_an_answer_that_is_no_answer_is_refused_whole(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_answer(text, SPACE)


def test_a_number_beyond_float_is_no_value_of_any_parameter() -> None:
    text = answer(hints=[{**HINT, "values": ["?"]}]).replace('"?"', "1e999, -1e999")
    advice = read_answer(text, SPACE)
    assert advice.hints[0].values == (float("inf"), float("-inf"))
    assert screen(advice, QUESTION)[0].hints == ()


plain = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
                     | st.sampled_from(["m0", "m1", "many/many", "tile", "gemv", "cancellation", 16, 2]),
                     lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*HINT, "x"]), inner, max_size=4),
                     max_leaves=12)
documents = st.dictionaries(st.sampled_from([*answer_schema()["properties"], "code"]), plain, max_size=7)


@FEW
@given(document=documents)
def test_any_json_object_gives_advice_inside_the_space(document: dict) -> None:
    advice = read_answer(json.dumps(document), SPACE)
    ordered, space, _, _ = asked(advice)
    check_plan(ordered, space)
    assert serial.loads(serial.dumps(ordered.record), AdviceRecord) == ordered.record


@FEW
@given(text=st.text(max_size=60))
def test_any_text_gives_advice_or_one_clear_refusal(text: str) -> None:
    try:
        read_answer(text, SPACE)
    except UsageError as exc:
        assert str(exc)


def test_the_schema_closes_every_vocabulary() -> None:
    schema = answer_schema()
    assert schema["additionalProperties"] is False and schema["required"] == list(schema["properties"])
    assert schema["properties"]["risks"]["items"]["enum"] == [risk.value for risk in Risk]
    assert schema["properties"]["hints"]["items"]["additionalProperties"] is False


def test_the_question_holds_facts_and_no_names() -> None:
    secret = evolve(QUESTION, evidence=advise.evidence((record_of(PLAN.steps[0]),), SPACE))
    text = serial.dumps(question_json(secret))
    for match_id in MATCHES:
        assert match_id not in text
    for node in ("add_0", "mul_1", "silu_2"):
        assert node not in text
    document = question_json(secret)
    assert [m["match"] for m in document["matches"]] == list(match_names(SPACE).values())
    assert {s["match"] for s in document["steps"]} <= set(match_names(SPACE).values())
    (fact,) = document["evidence"]
    assert (fact["us"], fact["registers"], fact["verdict"], fact["failure"]) == (3.0, 40, "pass", "")
    steps = {s["implementation"]: {p["name"]: p["values"] for p in s["parameters"]} for s in document["steps"]}
    assert steps["many/many"]["width"] == [1, 2, 4]


def test_the_key_of_an_answer_ignores_what_never_repeats() -> None:
    key = question_key(QUESTION)
    assert key == question_key(evolve(QUESTION, budget_s=1.0, budget_plans=3, evidence=advise.evidence((record_of(PLAN.steps[0]),), SPACE)))
    assert len({key, question_key(evolve(QUESTION, round=1)), question_key(evolve(QUESTION, target="a100"))}) == 3
    smaller = evolve(SPACE, steps=SPACE.steps[:-1])
    assert question_key(evolve(QUESTION, space=smaller)) != key


def test_rejected_items_are_short_and_printable() -> None:
    assert RejectedItem(item="a\nb" + "c" * 200, rule="J1").item == ("a\\nb" + "c" * 200)[:80]
    assert RejectedItem(item="plain text", rule="J1").item == "plain text"


@pytest.mark.parametrize("inside", ('', '"a[{"', r'"\\"', r'"\"[{", "\u00e9"', '"é\ud800"', "[], {}", '{"a": [], "b": [{}]}'))
@pytest.mark.parametrize(("opening", "closing"), (("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")))
def test_as_deep_as_is_allowed_is_taken_and_one_deeper_is_not(opening: str, closing: str, inside: str) -> None:
    own = {"[], {}": 1, '{"a": [], "b": [{}]}': 3}.get(inside, 0)
    inside = f"[{inside}]"
    levels = (serial.MAX_DEPTH - own - 1) // (2 if opening.startswith("[{") else 1)
    text = opening * levels + inside + closing * levels
    deep = levels * (2 if opening.startswith("[{") else 1) + own + 1
    serial.parse("[" * (serial.MAX_DEPTH - deep) + text + "]" * (serial.MAX_DEPTH - deep))
    with pytest.raises(UsageError, match="nested deeper"):
        serial.parse("[" * (serial.MAX_DEPTH + 1 - deep) + text + "]" * (serial.MAX_DEPTH + 1 - deep))


def test_a_deep_text_of_megabytes_is_refused_soon() -> None:
    began = time.monotonic()
    with pytest.raises(UsageError, match="nested deeper"):
        serial.parse("[" * 5_000_000 + "]" * 5_000_000)
    assert time.monotonic() - began < 2.0


@given(st.text(alphabet='[{]}"\\a\né\ud800', max_size=40), st.integers(0, 3))
def test_brackets_count_outside_of_strings_alone(text: str, limit: int) -> None:
    """As deep as a walk from character to character finds it."""
    depth, deepest, in_string, escaped = 0, 0, False, False
    for one in text:
        if in_string:
            escaped, in_string = not escaped and one == "\\", escaped or one != '"'
        else:
            in_string, depth = one == '"', depth + (one in "[{") - (one in "]}")
            deepest = max(deepest, depth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serial, "MAX_DEPTH", limit)
        try:
            serial.parse(text)
            said = ""
        except UsageError as exc:
            said = str(exc)
    assert ("nested deeper" in said) is (deepest > limit)
