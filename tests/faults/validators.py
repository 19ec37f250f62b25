"""Validators that misbehave, and evidence of others: each costs the kernel that it judged, or is not used."""

from pathlib import Path
from typing import Any

import pytest
from test_chain_soundness import answered, selected
from test_cheating_kernels import evaluated
from test_program_check import adding
from test_second_opinion import judged

from agentcompile_core.errors import Cause
from agentcompile_core.ir.region import Role
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.events import SearchStarted
from agentcompile_core.store import Store, keys
from agentcompile_core.testing import bad_validators, doubles
from agentcompile_core.testing.fake_kernels import BEHAVIOURS
from agentcompile_core.worker.evaluate import WorkerState

from . import cheap
from .kernels import CHILD, Times
from .registry import add, fault
from .seen import noted, right, told

AREA, KEPT = "plugins", "the other kernel was selected, the program is right"
CATALOG = "agentcompile_core.testing.bad_validators:catalog"
WHAT = {"nan": "returns a NaN", "infinite": "returns an infinity", "raises": "raises", "exits": "calls sys.exit", "interrupts":
        "raises KeyboardInterrupt", "base": "raises what is no Exception", "hangs": "hangs", "dies": "ends its process", "none":
        "returns nothing", "number": "returns a number", "contradicts": "passes what its own check failed", "renamed":
        "returns another's verdict", "mistyped": "returns a text as its outcome"}
IN_PROCESSES = ("hangs", "dies")  # of their own


def _misbehaving(how: str, scope: str) -> Any:
    def run(folder: Path) -> str:
        name, every = f"{scope}_{how}", tuple(bad_validators.catalog().validators.values())
        (one,) = (v for v in every if v.name == name)
        made = cheap.compiled(cheap.module(folder), Store(None), family=Times(2.0, 4.0), validators=("simple", name),
                              workers=CATALOG if how in IN_PROCESSES else cheap.BAD_HERE, extra=(("bad", cheap.offers(validators=one)),))
        right(made)
        (selection,) = made.compilation.selections
        assert [s.step.schedule["us"] for s in selection.steps] == [4.0], "the kernel that it did not judge was used"
        return told(made, name, folder)

    return run


for _how, _what in WHAT.items():
    add(AREA, f"a validator that {_what}", f"check() {_what} about the faster of two kernels", _misbehaving(_how, "candidate"), KEPT)
for _how in ("nan", "base", "hangs"):
    add(AREA, f"a validator of winners that {WHAT[_how]}", f"check() of a winner {WHAT[_how]}", _misbehaving(_how, "winner"), KEPT)


def _never_judges(name: str, words: str) -> Any:
    def run(folder: Path) -> str:
        (one,) = (v for v in bad_validators.catalog().validators.values() if v.name == name)
        made = cheap.compiled(cheap.module(folder), Store(None), workers=cheap.BAD_HERE, validators=(name,),
                              extra=(("bad", cheap.offers(validators=one)),))
        right(made)
        assert not made.compilation.selections[0].steps
        said = [r.message for r in made.compilation.records if r.failure is not None]
        assert said and all(words in message for message in said), said
        return said[0]

    return run


for _name, _what, _words in (("silent", "has nothing to say of any kernel", "has anything to say"),
                             ("unsure", "does not say whether it applies", "not True or False"),
                             ("uncontrolled", "ends the process in its controls", "fails its own controls"),
                             ("without_controls", "has no controls and passes everything", "nothing shows that it works"),
                             ("without_bad_controls", "has no bad control and passes everything", "nothing shows that it works")):
    add(AREA, f"a validator that {_what}", f"a validator {_what}", _never_judges(_name, _words), "no kernel was used; the framework runs")


@fault("kernels", "a validator of winners refuses the fastest kernel", KEPT)
def _a_winner_that_is_refused(folder: Path) -> str:
    made = cheap.compiled(cheap.module(folder), Store(None), family=Times(3.0, 5.0), validators=("simple", "picky"), workers=cheap.HERE,
                          extra=(("picky", cheap.offers(validators=doubles.PickyValidator())),))
    right(made)
    (step,) = made.compilation.selections[0].steps
    assert step.step.schedule["us"] == 5.0 and "picky found nothing" in step.reason
    return told(made, "a race that only this validator sees", folder)


@fault("kernels", "the reference reads an operator as the kernel does, and both are wrong", "the framework in float64 has said so")
def _a_reference_that_shares_a_misreading(folder: Path) -> str:
    session = WorkerState(load_catalog(only=("emulation", "numerics", "elementwise", "transformers_rules"), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        found = judged(session, patch)
    assert found.failure is Cause.CONTRACT and found.measurement is None
    return found.message


@fault("kernels", "oracle, comparisons or timing are others than those of the evidence in the cache", "it was all evaluated again")
def _evidence_of_an_older_oracle(folder: Path) -> str:
    seen: list[Any] = []

    def searched() -> tuple[int, int]:
        made = cheap.compiled(cheap.module(folder), Store(folder / "store"), workers=cheap.HERE, report=seen.append)
        right(made)
        started = [e for e in seen if isinstance(e, SearchStarted)][-1]
        return started.total, started.cached

    first, again = searched(), searched()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "judging_code", lambda: "another oracle")
        other = searched()
    assert first == other == (first[0], 0) and again == (first[0], first[0]) and first[0] > 0
    return f"validate: {other[0]} candidates, {other[1]} of them in the cache, where {again[1]} were by the same oracle"


def _installed(words: str, **changes: Any) -> Any:
    def run(folder: Path) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(doubles, "behave", adding(**changes))  # here; in the child they add
            made = cheap.compiled(cheap.module(folder), Store(None), workers=CHILD)
            right(made)
        assert len(made.compilation.selections[0].steps) == 1, "validation has passed the kernel"
        return noted(made, words)

    return run


INSTALLED: dict[str, tuple[str, dict[str, Any]]] = {
    "is off by 1 %": ("is beyond the error budget", {"factor": 1.01}),
    "raises": ("an illegal address", {"error": RuntimeError("an illegal address")}),
    "has NaN where the framework has none": ("NaN or infinite", {"factor": float("nan")}),
}
for _name, (_words, _changes) in INSTALLED.items():
    add("kernels", f"an installed program that {_name}", f"the program of validated kernels {_name} once it is installed",
        _installed(_words, **_changes), "the framework serves, the result is right")


@fault("timing", "a time that no memory allows, with weights that no cache holds", "the time is no record")
def _a_kernel_that_is_faster_than_cold_memory(folder: Path) -> str:
    from attrs import evolve

    trial = doubles.fake_trial("honest")
    operands = tuple(evolve(o, role=Role.WEIGHT) if o.role is Role.INPUT else o for o in trial.match.operands)
    slow = evolve(trial.target, l2_bytes=400, memory_gbps=0.2)
    found = evaluated("honest", 5.0, match=evolve(trial.match, operands=operands), target=slow)
    assert found.failure is Cause.CONTRACT and found.measurement is None
    return found.message


def _untimed(behaviour: str) -> Any:
    def run(folder: Path) -> str:
        found = evaluated(behaviour, backend="no_time")
        assert found.failure is Cause.TOLERANCE and found.verdicts[0].passed, "the validator alone has seen it"
        return f"{found.failure.value}: {found.message}"

    return run


for _name in ("lazy", "caches"):
    add("timing", f"where nothing can be timed, a kernel that {BEHAVIOURS[_name]}",
        f"a candidate {BEHAVIOURS[_name]}, on a backend without a clock", _untimed(_name), "it is not even provisional")


@fault("timing", "a step is faster, and stops working, inside the captured chain", "the step before it stays")
def _a_step_that_stops_inside_the_chain(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        found = answered(patch, selected("honest", 5.0), selected("stops", 1.0))
    assert [x.step.schedule["behave"] for s in found.selections for x in s.steps] == ["honest"] and found.refused
    return f"{found.refused[0][2]}: {found.refused[0][3]}"
