"""Every item of an advisor's answer is checked against the space on its own; what does not fit is refused with a rule id."""

from .advice import Advice, Hint, Question, RejectedItem
from .plan import PlanSpace

MAX_ITEMS = 64


def screen(advice: Advice, question: Question) -> tuple[Advice, tuple[RejectedItem, ...]]:
    """Split an answer into what lies inside the space and what was refused, item by item.

    Rules: ``A1`` unknown implementation, ``A2`` unknown match, ``A3`` unknown parameter, ``A4`` value outside its list,
    ``A5`` repeated item, ``A6`` no such cover, ``A7`` more than 64 items.
    """
    refused: list[RejectedItem] = list(advice.refused[:MAX_ITEMS])
    order = _known(advice.order, {s.implementation for s in question.space.steps}, "A1", refused)
    covers = _known(advice.cover_order, {c.rank for c in question.space.covers}, "A6", refused)
    hints: list[Hint] = []
    for hint in advice.hints[:MAX_ITEMS]:
        rule, kept = _screen_hint(hint, question.space)
        if rule:
            refused.append(RejectedItem(item=f"hint {hint.implementation}.{hint.parameter}={hint.values}", rule=rule))
        if kept is not None:
            hints.append(kept)
    refused += [RejectedItem(item=f"hint {h.parameter}", rule="A7") for h in advice.hints[MAX_ITEMS:]]
    accepted = Advice(label=advice.label, order=order, cover_order=covers, hints=tuple(hints),
                      risks=tuple(dict.fromkeys(advice.risks)), diagnoses=tuple(dict.fromkeys(advice.diagnoses)))
    return accepted, tuple(refused)


def _known(items: tuple, allowed: set, rule: str, refused: list[RejectedItem]) -> tuple:
    kept: list = []
    for item in items[:MAX_ITEMS]:
        if item not in allowed:
            refused.append(RejectedItem(item=str(item)[:80], rule=rule))
        elif item in kept:
            refused.append(RejectedItem(item=str(item)[:80], rule="A5"))
        else:
            kept.append(item)
    refused += [RejectedItem(item=str(item)[:80], rule="A7") for item in items[MAX_ITEMS:]]
    return tuple(kept)


def _screen_hint(hint: Hint, space: PlanSpace) -> tuple[str, Hint | None]:
    steps = [s for s in space.steps if s.match_id == hint.match_id]
    if not steps:
        return "A2", None
    step = next((s for s in steps if s.implementation == hint.implementation), None)
    if step is None:
        return "A1", None
    parameter = next((p for p in step.space.parameters if p.name == hint.parameter), None)
    if parameter is None:
        return "A3", None
    values = tuple(v for v in hint.values if any(v == known and type(v) is type(known) for known in parameter.values))
    if not values:
        return "A4", None
    kept = Hint(match_id=hint.match_id, implementation=hint.implementation, parameter=hint.parameter, values=tuple(dict.fromkeys(values)))
    return ("A4" if len(values) < len(hint.values) else ""), kept
