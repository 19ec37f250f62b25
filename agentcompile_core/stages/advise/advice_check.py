"""Every item of an advisor's answer is checked against the space on its own; what does not fit is refused with a rule id."""

from collections.abc import Iterable
from typing import Any, TypeVar

from ...ir.advice import Advice, Diagnosis, Hint, Question, RejectedItem, Risk
from ...ir.plan import PlanSpace

T = TypeVar("T")

MAX_ITEMS = 64


def screen(advice: Advice, question: Question) -> tuple[Advice, tuple[RejectedItem, ...]]:
    """Split an answer into what lies inside the space and what was refused, item by item.

    Rules: ``A1`` unknown implementation, ``A2`` unknown match, ``A3`` unknown parameter, ``A4`` value outside its list,
    ``A5`` repeated item, ``A6`` no such cover, ``A7`` one of too many items (more than 64 of a list, or for hints more
    than the space has parameters), ``A8`` not of the type or closed vocabulary of its field.
    """
    space = question.space
    refused: list[RejectedItem] = list(advice.refused[:MAX_ITEMS])

    def typed(name: str, kind: type[T]) -> tuple[T, ...]:
        return _typed(_listed(advice, name, refused), kind, refused)

    label = _typed((advice.label,) if advice.label is not None else (), str, refused)
    refused += [RejectedItem(item=repr(word), rule="A8") for word in label if word not in question.labels]
    order = _known(typed("order", str), {s.implementation for s in space.steps}, "A1", refused)
    covers = _known(typed("cover_order", int), {c.rank for c in space.covers}, "A6", refused)
    hints = _hints(typed("hints", Hint), space, refused)
    risks, diagnoses = typed("risks", Risk), typed("diagnoses", Diagnosis)
    accepted = Advice(label=next((word for word in label if word in question.labels), None), order=order, cover_order=covers, hints=hints,
                      risks=_once(risks[:MAX_ITEMS], refused), diagnoses=_once(diagnoses[:MAX_ITEMS], refused))
    return accepted, tuple(refused)


def _listed(advice: Advice, name: str, refused: list[RejectedItem]) -> tuple[Any, ...]:
    """The items of one field; a field that is no list counts as one item, and the others stand."""
    given = getattr(advice, name)
    if type(given) is tuple or type(given) is list:
        return tuple(given)
    refused.append(RejectedItem(item=f"{name}, a {type(given).__name__}", rule="A8"))
    return ()


def _said(item: object) -> str:
    """What an item is called where it is refused; it may fail to say so."""
    try:
        return repr(item)
    except BaseException:
        return type(item).__name__


def _typed(items: Iterable[Any], kind: type[T], refused: list[RejectedItem]) -> tuple[T, ...]:
    """The items of one type; an advisor in Python may have put anything into its answer."""
    found = tuple(items)
    refused += [RejectedItem(item=_said(item), rule="A8") for item in found[:MAX_ITEMS] if type(item) is not kind]
    return tuple(item for item in found if type(item) is kind)


def _known(items: tuple, allowed: set, rule: str, refused: list[RejectedItem]) -> tuple:
    kept = _once(items[:MAX_ITEMS], refused)
    refused += [RejectedItem(item=str(item), rule=rule) for item in kept if item not in allowed]
    refused += [RejectedItem(item=str(item), rule="A7") for item in items[MAX_ITEMS : 2 * MAX_ITEMS]]
    return tuple(item for item in kept if item in allowed)


def _once(items: tuple, refused: list[RejectedItem]) -> tuple:
    kept: dict = {}
    for item in items:
        if item in kept:
            refused.append(RejectedItem(item=str(getattr(item, "value", item)), rule="A5"))
        kept[item] = None
    return tuple(kept)


def _hints(hints: tuple[Hint, ...], space: PlanSpace, refused: list[RejectedItem]) -> tuple[Hint, ...]:
    most = max(MAX_ITEMS, sum(len(step.space.parameters) for step in space.steps))
    found: dict[tuple[str, str, str], Hint] = {}
    for hint in hints[:most]:
        if not _is_hint(hint):
            refused.append(RejectedItem(item=_said(hint), rule="A8"))
            continue
        rule, kept = _screen_hint(hint, space)
        key = (hint.match_id, hint.implementation, hint.parameter)
        if kept is not None and key in found:
            rule, kept = "A5", None
        if rule:
            refused.append(RejectedItem(item=f"hint {hint.implementation}.{hint.parameter}={_said(hint.values)}", rule=rule))
        if kept is not None:
            found[key] = kept
    refused += [RejectedItem(item=f"hint {_said(hint)}", rule="A7") for hint in hints[most : most + MAX_ITEMS]]
    return tuple(found.values())


def _is_hint(hint: Hint) -> bool:
    """Whether the fields of a hint are what they are said to be."""
    named = all(type(word) is str for word in (hint.match_id, hint.implementation, hint.parameter))
    return named and type(hint.values) in (tuple, list)


def _screen_hint(hint: Hint, space: PlanSpace) -> tuple[str, Hint | None]:
    steps = space.spaces_of(hint.match_id)
    if not steps:
        return "A2", None
    step = next((s for s in steps if s.implementation == hint.implementation), None)
    if step is None:
        return "A1", None
    parameter = next((p for p in step.space.parameters if p.name == hint.parameter), None)
    if parameter is None:
        return "A3", None
    values = tuple(v for v in hint.values if any(type(v) is type(known) and v == known for known in parameter.values))
    if not values:
        return "A4", None
    kept = Hint(match_id=hint.match_id, implementation=hint.implementation, parameter=hint.parameter, values=tuple(dict.fromkeys(values)))
    return ("A4" if len(values) < len(hint.values) else ""), kept
