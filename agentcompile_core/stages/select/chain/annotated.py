"""What the chain selected, with the reason at every step: what it was faster than, or what became of its alternatives."""

from attrs import evolve

from ....ir.decisions import ChainTrial
from ....ir.plan import Fusion, Step
from ....ir.selection import Basis, SelectedStep, Selection
from ....worker.chain_question import ChainAnswer, ChainQuestion


def annotated(new: Selection, old: Selection, answer: ChainAnswer, question: ChainQuestion) -> Selection:
    """The selection ``new`` of the answer in the place of ``old``, which the chain began with: its cover and the reasons."""
    kept = {s.step.match_id for s in new.steps}
    others = [cover for cover in question.covers if cover.signature == new.signature]
    origin = next((s for s in (old, *others) if kept <= set(s.cover.matches)), old)
    before = {s.step.match_id: s for s in origin.steps}

    def reason(step: SelectedStep) -> SelectedStep:
        was = before.get(step.step.match_id)
        if was is not None and was.step == step.step:
            why = _outcome(step, new.signature, answer, question)
        else:
            why = "faster inside the captured chain" + (f" than {was.step.schedule}, which won alone" if was else "")
        if origin is not old and step.step.match_id not in old.cover.matches:
            why = f"its cover is faster inside the captured chain than cover {old.cover.rank}, which won alone; {why}"
        return evolve(step, basis=Basis.CHAIN, reason=f"{was.reason}; {why}" if was is not None and was.step == step.step else why)

    wrong = {match: why for signature, match, _, why in answer.refused if signature == new.signature}
    removed = tuple((m, wrong.get(m, "inside the captured chain the framework is faster")) for m in before if m not in kept)
    cover = evolve(
        origin.cover,
        matches=tuple(m for m in origin.cover.matches if m in kept),
        fusion=origin.cover.fusion if kept == set(before) else Fusion.PARTIAL if kept else Fusion.FRAMEWORK,
    )
    return evolve(
        origin,
        steps=tuple(reason(s) for s in new.steps),
        cover=cover,
        basis=Basis.CHAIN if kept else Basis.FALLBACK,
        fallback_reasons=(*origin.fallback_reasons, *removed),
    )


def _outcome(step: SelectedStep, signature: str, answer: ChainAnswer, question: ChainQuestion) -> str:
    """What became of the alternatives of a step that stayed."""
    held = {(s.signature, x.step) for s in (*question.selections, *question.covers) for x in s.steps}
    mine = [a for a in question.alternatives if a.place == (signature, step.step.match_id)
            and (a.selected is None or (a.signature, a.selected.step) not in held)]
    count = len(mine)
    if not count:
        return "there was no alternative to try inside the captured chain"
    tried = sum(1 for a in mine if (*a.place, a.step) in _tried(answer))
    places = {place for trial in answer.trials if trial.taken for place in _changed(trial)}
    if any(place[:2] == (signature, step.step.match_id) and place[2] != step.step for place in places):
        return "it was replaced on the way, and is faster beside what else is held"
    if not tried:
        return f"none of its {count} alternatives was tried inside the captured chain: the time was used up"
    if tried < count:
        return f"of its {count} alternatives none that the time allowed was faster inside the captured chain"
    return f"none of its {count} alternatives was faster inside the captured chain"


def _tried(answer: ChainAnswer) -> set[tuple[str, str, Step | None]]:
    """Everything that a trial of the log put into the place of a step: signature, match, and step."""
    return {place for trial in answer.trials for place in _changed(trial)}


def _changed(trial: ChainTrial) -> list[tuple[str, str, Step | None]]:
    return [(trial.signature, trial.match_id, trial.step), *((signature, step.match_id, step) for signature, step in trial.beside),
            *((signature, match, None) for signature, match in trial.without)]
