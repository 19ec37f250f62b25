"""Advice as JSON: the question as an advisor outside this process sees it, the schema of an answer, and a strict reader.

Matches are called m0, m1, ... in the order of the space, so that no name of a node or a model leaves the process.
"""

from collections.abc import Iterable
from typing import Any

from ..errors import UsageError
from ..ir import serial
from ..ir.advice import Advice, Diagnosis, Hint, Question, RejectedItem, Risk
from ..ir.plan import PlanSpace
from ..ir.region import SemanticLabel

MAX_BYTES = 64 * 1024


def match_names(space: PlanSpace) -> dict[str, str]:
    """Match ids to the short names used outside."""
    return {match_id: f"m{i}" for i, match_id in enumerate(dict.fromkeys(s.match_id for s in space.steps))}


def question_json(question: Question) -> dict[str, Any]:
    """The question as plain JSON types: summary, space with closed value lists, target, evidence, budget."""
    names = match_names(question.space)
    matches = {m.id: m for m in question.summary.matches}
    return {
        "schema": serial.SCHEMA, "round": question.round, "target": question.target,
        "budget": {"seconds": question.budget_s, "plans": question.budget_plans},
        "region": {"label": question.summary.label, "dominant": question.summary.dominant,
                   "operators": [list(pair) for pair in question.summary.operators], "instances": question.summary.instances,
                   "dynamic_shapes": question.summary.dynamic_shapes,
                   **({"labels": list(question.summary.labels)} if question.summary.labels else {})},
        "matches": [_match(names[match_id], matches.get(match_id)) for match_id in names],
        "covers": [{"rank": c.rank, "fusion": c.fusion.value, "matches": [names[m] for m in c.matches if m in names]}
                   for c in question.space.covers],
        "steps": [{"match": names[s.match_id], "implementation": s.implementation, "origin": s.origin.value, "points": len(s.space),
                   "parameters": [{"name": p.name, "values": list(p.values)} for p in s.space.parameters],
                   "first": [dict(point.items) for point in s.space.points[:3]]} for s in question.space.steps],
        "evidence": [{"match": names.get(e.match_id, ""), "implementation": e.implementation, "schedule": dict(e.schedule),
                      "verdict": e.verdict, "us": round(e.us, 3), "floor_us": round(e.floor_us, 3), "registers": e.registers,
                      "shared_bytes": e.shared_bytes, "failure": e.failure} for e in question.evidence],
    }


def _match(name: str, summary: Any) -> dict[str, Any]:
    if summary is None:
        return {"match": name}
    return {"match": name, "label": summary.label, "kind": summary.kind, "operators": list(summary.operators),
            "shapes": [list(s) for s in summary.shapes], "dtype": summary.dtype, "flops": summary.flops, "bytes": summary.bytes,
            "intensity": round(summary.intensity, 4)}


def question_key(question: Question) -> str:
    """Key of a recorded answer: summary, space, target preset, round and schema; measured facts and the budget do not count."""
    data = question_json(question)
    return serial.digest({k: data[k] for k in ("schema", "round", "target", "region", "matches", "covers", "steps")}, length=32)


CORE_LABELS = tuple(map(str, SemanticLabel))


def answer_schema(labels: Iterable[str] = CORE_LABELS) -> dict[str, Any]:
    """JSON schema of an answer; ``labels`` are the question's, the other closed vocabularies come from the enums."""
    def words(kind: type) -> dict[str, Any]:
        return {"type": "string", "enum": [member.value for member in kind]}  # type: ignore[attr-defined]

    value = {"anyOf": [{"type": "integer"}, {"type": "boolean"}, {"type": "string"}, {"type": "number"}]}
    hint = {"type": "object", "additionalProperties": False, "required": ["match", "implementation", "parameter", "values"],
            "properties": {"match": {"type": "string"}, "implementation": {"type": "string"}, "parameter": {"type": "string"},
                           "values": {"type": "array", "items": value}}}
    properties = {
        "label": {"anyOf": [{"type": "string", "enum": list(labels)}, {"type": "null"}]},
        "order": {"type": "array", "items": {"type": "string"}},
        "cover_order": {"type": "array", "items": {"type": "integer"}},
        "hints": {"type": "array", "items": hint},
        "risks": {"type": "array", "items": words(Risk)},
        "diagnoses": {"type": "array", "items": words(Diagnosis)},
    }
    return {"type": "object", "additionalProperties": False, "required": list(properties), "properties": properties}


def read_answer(text: str, space: PlanSpace, labels: Iterable[str] = CORE_LABELS) -> Advice:
    """Read an answer strictly, item by item; what does not fit is listed in ``refused`` with a rule id.

    Rules: ``J1`` unknown key, ``J2`` wrong type, ``J3`` word outside the vocabulary, ``J4`` unknown match name.

    Raises:
        UsageError: the text is too long, no JSON object, nested too deep, or has duplicate keys.
    """
    data = serial.parse(text, MAX_BYTES)
    if type(data) is not dict:
        raise UsageError(f"an answer must be a JSON object, got {type(data).__name__}")
    refused: list[RejectedItem] = []
    known = answer_schema()["properties"]
    refused += [RejectedItem(item=str(key), rule="J1") for key in data if key not in known]
    ids = {short: match_id for match_id, short in match_names(space).items()}
    label = data.get("label")
    if label is not None and label not in tuple(labels):
        refused.append(RejectedItem(item=repr(label), rule="J3"))
        label = None
    return Advice(
        label=label,
        order=tuple(_typed(_list(data, "order", refused), str, refused)),
        cover_order=tuple(_typed(_list(data, "cover_order", refused), int, refused)),
        hints=tuple(h for h in (_hint(item, ids, refused) for item in _list(data, "hints", refused)) if h is not None),
        risks=tuple(r for r in (_word(item, Risk, refused) for item in _list(data, "risks", refused)) if r is not None),
        diagnoses=tuple(d for d in (_word(item, Diagnosis, refused) for item in _list(data, "diagnoses", refused)) if d is not None),
        refused=tuple(refused))


def _list(data: dict[str, Any], key: str, refused: list[RejectedItem]) -> list[Any]:
    value = data.get(key, [])
    if type(value) is not list:
        refused.append(RejectedItem(item=f"{key}: {type(value).__name__}", rule="J2"))
        return []
    return value


def _typed(items: list[Any], kind: type, refused: list[RejectedItem]) -> list[Any]:
    refused += [RejectedItem(item=repr(item), rule="J2") for item in items if type(item) is not kind]
    return [item for item in items if type(item) is kind]


def _word(item: Any, kind: type, refused: list[RejectedItem]) -> Any:
    if type(item) is str and item in {member.value for member in kind}:  # type: ignore[attr-defined]
        return kind(item)
    refused.append(RejectedItem(item=repr(item), rule="J3"))
    return None


def _hint(item: Any, ids: dict[str, str], refused: list[RejectedItem]) -> Hint | None:
    fields = {"match": str, "implementation": str, "parameter": str, "values": list}
    whole = type(item) is dict and item.keys() == fields.keys() and all(type(item[name]) is kind for name, kind in fields.items())
    if not whole or any(type(v) not in (bool, int, float, str) for v in item["values"]):
        refused.append(RejectedItem(item=repr(item), rule="J2"))
        return None
    if item["match"] not in ids:
        refused.append(RejectedItem(item=repr(item["match"]), rule="J4"))
        return None
    return Hint(match_id=ids[item["match"]], implementation=item["implementation"], parameter=item["parameter"],
                values=tuple(item["values"]))
