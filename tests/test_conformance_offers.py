"""The kits for advisors, implementations and backends: planted defects are refused for their reason, good offers pass."""

import itertools
import time
from typing import Any

import pytest
import torch
from agentcompile_rules_transformers.testing import linear_case, norm_case
from attrs import evolve
from planted import refused

from agentcompile_core.errors import BuildError, Reject
from agentcompile_core.ir.advice import Advice, Hint
from agentcompile_core.ir.graph import DType
from agentcompile_core.ir.plan import Origin, Parameter, Schedule, ScheduleSpace
from agentcompile_core.plugin.interfaces import Advisor, Implementation
from agentcompile_core.stages.advise.heuristic import HeuristicAdvisor
from agentcompile_core.testing.advisor_conformance import AdvisorConformance
from agentcompile_core.testing.backend_conformance import BackendConformance
from agentcompile_core.testing.doubles import FakeBackend, NoTimeBackend, ReplayingBackend, fake_source, fake_trial
from agentcompile_core.testing.implementation_conformance import ImplementationConformance

# ---- advisors


class Polite(Advisor):
    """Likes things in the order in which they are named."""

    name = "polite"

    def advise(self, question):
        hints = tuple(Hint(match_id=s.match_id, implementation=s.implementation, parameter=p.name, values=p.values)
                      for s in question.space.steps for p in s.space.parameters)
        return Advice(order=tuple(dict.fromkeys(s.implementation for s in question.space.steps)), hints=hints)


class Outside(Polite):
    def advise(self, question):
        return evolve(super().advise(question), order=("mine/fastest",))


class Unasked(Polite):
    def advise(self, question):
        return super().advise(question) if question.space.steps else Advice(cover_order=(1,))


class NeedsSteps(Polite):
    def advise(self, question):
        assert question.space.steps[0]
        return super().advise(question)


class Slow(Polite):
    def advise(self, question):
        time.sleep(1.2 if question.budget_s == 0.1 else 0.0)
        return super().advise(question)


class Fickle(Polite):
    turn = itertools.count()

    def advise(self, question):
        answer = super().advise(question)
        return evolve(answer, order=answer.order[:: -1 if next(self.turn) % 2 else 1])


class Marks(Polite):
    def advise(self, question):
        answer = super().advise(question)
        object.__setattr__(question, "budget_plans", -1)
        return answer


class Chatty(Polite):
    def advise(self, question):
        return "use family0"


class GoodAdvisor(AdvisorConformance):
    advisor = Polite()


@pytest.mark.parametrize("advisor,test,reason", [
    (type("Bad", (Polite,), {"name": "Not Polite"})(), "test_identity", "bad name"),
    (Outside(), "test_everything_it_says_lies_inside_the_space", "A1 mine/fastest"),
    (Chatty(), "test_everything_it_says_lies_inside_the_space", "returned str, not Advice"),
    (Unasked(), "test_an_empty_space_gets_an_answer", "the answer names"),
    (NeedsSteps(), "test_an_empty_space_gets_an_answer", "raised IndexError"),
    (Slow(), "test_it_answers_within_its_budget", "of a budget of 0.1 s"),
    (Fickle(), "test_equal_questions_get_equal_answers", "differently the second time"),
    (Marks(), "test_the_question_is_left_as_it_was", "changed the question"),
], ids=lambda value: type(value).__name__ if isinstance(value, Advisor) else "")
def test_defects_of_advisors_are_refused(advisor: Advisor, test: str, reason: str) -> None:
    refused(GoodAdvisor, test, reason, advisor=advisor)


def test_who_does_not_claim_to_be_deterministic_need_not_be() -> None:
    type("Kit", (GoodAdvisor,), {"advisor": Fickle(), "deterministic": False})().test_equal_questions_get_equal_answers()


class TestGoodAdvisor(GoodAdvisor):
    pass

class TestHeuristic(AdvisorConformance):
    """The core's own advisor."""

    advisor = HeuristicAdvisor()


# ---- implementations


class Product(Implementation):
    """``out = weight @ x`` on the framework's own operator."""

    name, origin = "product", Origin.HANDWRITTEN
    calls = ("mv", "mm")

    def accepts(self, match, target):
        plain = match.kind == "linear" and match.epilogue is None and match.text("norm") == "none" and match.integer("pair") == 1
        return True if plain else Reject("serves plain products only")

    def space(self, match, target):
        points = tuple(Schedule({"call": call}) for call in self.calls)
        return ScheduleSpace(parameters=(Parameter(name="call", values=self.calls),), points=points)

    def bind(self, match, schedule, target):
        def run(x, weight, out):
            self.compute(x, weight, out)

        return run

    def compute(self, x, weight, out):
        torch.mv(weight, x.view(-1), out=out.view(-1))


class Returns(Product):
    def compute(self, x, weight, out):
        return weight @ x.view(-1)


class Accumulates(Product):
    def compute(self, x, weight, out):
        out.nan_to_num_(0.0).view(-1).add_(weight @ x.view(-1))


class ChangesInput(Product):
    def compute(self, x, weight, out):
        super().compute(x, weight, out)
        x.mul_(2.0)


class Remembers(Product):
    kept = None

    def compute(self, x, weight, out):
        type(self).kept = x.clone() if type(self).kept is None else type(self).kept
        super().compute(type(self).kept, weight, out)


class Imprecise(Product):
    def compute(self, x, weight, out):
        super().compute(x, weight, out)
        out.mul_(1.02)


class AsksTheDevice(Product):
    def compute(self, x, weight, out):
        super().compute(x, weight, out)
        if float(x.sum()) == 1e30:
            out.zero_()


class WrongNames(Product):
    def bind(self, match, schedule, target):
        return lambda a, b, out: None


class NoCallable(Product):
    def bind(self, match, schedule, target):
        return None


class Generated(Product):
    origin = Origin.GENERATED


class Grumpy(Product):
    def accepts(self, match, target):
        return super().accepts(match, target) is True or Reject("no")


class GoodImplementation(ImplementationConformance):
    implementation = Product()
    cases, rejected = (linear_case(n=33, k=48, dtype=DType.F32), linear_case(n=8, k=17)), (norm_case(columns=64),)


@pytest.mark.parametrize("implementation,test,reason", [
    (Generated(), "test_identity", "origin is .*GENERATED"),
    (type("Maybe", (Product,), {"capturable": "yes"})(), "test_identity", "capturable is 'yes'"),
    (Grumpy(), "test_accepts_and_explains", "'no' says too little"),
    (type("Many", (Product,), {"calls": ("mv", "mv")})(), "test_space_is_bounded_and_repeatable", "lists a schedule twice"),
    (NoCallable(), "test_results_on_the_cpu", "bind\\(\\) returned NoneType"),
    (WrongNames(), "test_results_on_the_cpu", "does not take every operand of the match by name"),
    (Returns(), "test_results_on_the_cpu", "is nan"),
    (Accumulates(), "test_results_on_the_cpu", "elements beyond the budget|two runs"),
    (ChangesInput(), "test_results_on_the_cpu", "changed: x"),
    (Remembers(), "test_results_on_the_cpu", "elements beyond the budget"),
    (Imprecise(), "test_results_on_the_cpu", "elements beyond the budget"),
], ids=lambda value: type(value).__name__ if isinstance(value, Implementation) else "")
def test_defects_of_implementations_are_refused(implementation: Implementation, test: str, reason: str) -> None:
    refused(GoodImplementation, test, reason, implementation=implementation)


def test_what_asks_the_device_is_not_capturable() -> None:
    kit = type("Kit", (GoodImplementation,), {"implementation": AsksTheDevice()})()
    with pytest.raises(AssertionError, match="capturable is True, but a run asks the device for a value"):
        kit.test_capturable_is_true_of_it()
    honest = type("Honest", (AsksTheDevice,), {"capturable": False})()
    type("Kit", (GoodImplementation,), {"implementation": honest})().test_capturable_is_true_of_it()


class TestGoodImplementation(GoodImplementation):
    pass


# ---- backends


class GoodBackend(BackendConformance):
    backend, trial, broken = FakeBackend(), fake_trial("honest"), fake_source("no_build")


def backend(base: type = FakeBackend, **methods: Any) -> FakeBackend:
    return type("Planted", (base,), methods)()


TURN = itertools.count()


def other_arch(self, source, target, deadline_s=120.0):
    return evolve(FakeBackend.build(self, source, target), arch="sm_00")


def other_sum(self, source, target, deadline_s=120.0):
    return evolve(FakeBackend.build(self, source, target), sha256="0")


def builds_all(self, source, target, deadline_s=120.0):
    return FakeBackend.build(self, fake_source("honest") if "no_build" in source.code else source, target)


def fails_late(self, source, target, deadline_s=120.0):
    try:
        return FakeBackend.build(self, source, target)
    except BuildError as exc:
        raise RuntimeError("the compiler said no") from exc


def stays(self, handle, launch, arguments, pdl, places):
    run = self.prepare_launch(handle, launch, arguments, pdl)
    return lambda stream, *addresses: run(stream)


def swaps(self, handle, launch, arguments, pdl, places):
    def run(stream, *addresses):
        now = {**dict(enumerate(arguments)), **dict(zip(places, reversed(addresses), strict=True))}
        self.prepare_launch(handle, launch, tuple(now.values()), pdl)(stream)

    return run


@pytest.mark.parametrize("planted,test,reason", [
    (backend(available=lambda self: False), "test_identity", "available\\(\\) returned False"),
    (backend(can_build=lambda self, target: Reject("no")), "test_identity", "says too little"),
    (backend(compiler=lambda self: ""), "test_identity", "part of every cache key"),
    (backend(live_target=lambda self: "h200"), "test_identity", "must return a Target or None"),
    (backend(suffix=lambda self, language: language), "test_library_and_suffixes", "must begin with"),
    (backend(library_digest=lambda self, language: str(next(TURN))), "test_library_and_suffixes", "second time"),
    (backend(library_digest=lambda self, language: "abc"), "test_library_and_suffixes", "does not build"),
    (backend(build=other_arch), "test_build_returns_a_whole_kernel", "sm_00"),
    (backend(build=other_sum), "test_build_returns_a_whole_kernel", "sha256"),
    (backend(build=builds_all), "test_a_broken_source_is_refused", "compiled a source that is broken"),
    (backend(build=fails_late), "test_a_broken_source_is_refused", "raised RuntimeError"),
    (backend(load=lambda self, kernel: object()), "test_loading_twice_gives_the_same_handle", "another handle"),
    (backend(prepare_launch=lambda self, *a: lambda stream: None), "test_launches_compute", "is nan"),
    (backend(prepare_moving=stays), "test_launches_move", "prepare_moving"),
    (backend(prepare_moving=swaps), "test_launches_move", "prepare_moving"),
    (backend(time=lambda self, run, **k: (1.0,)), "test_time_is_told_or_refused", "1 times for 3 repetitions"),
    (backend(time=lambda self, run, **k: (1.0, 0.0, 2.0)), "test_time_is_told_or_refused", "finite and above 0"),
    (backend(time=lambda self, run, **k: Reject("there is no clock")), "test_time_is_told_or_refused", "clock is True, but"),
    (backend(capture=lambda self, run, **k: run), "test_what_is_captured_is_replayed", "captures is False, but capture\\(\\) returned"),
    (backend(capture=lambda self, run, **k: Reject("no")), "test_what_is_captured_is_replayed", "says too little"),
    (ReplayingBackend("there is no memory for it"), "test_what_is_captured_is_replayed", "refuses a kernel of the backend: there is no"),
    (backend(ReplayingBackend, capture=lambda self, run, **k: lambda: None), "test_what_is_captured_is_replayed", "does not compute what"),
    (backend(ReplayingBackend, is_lost=lambda self: True), "test_what_is_captured_is_replayed", "left the device unusable"),
    (backend(NoTimeBackend, time=FakeBackend.time), "test_time_is_told_or_refused", "clock is False, but"),
], ids=lambda value: "")
def test_defects_of_backends_are_refused(planted: FakeBackend, test: str, reason: str) -> None:
    refused(GoodBackend, test, reason, backend=planted)


class TestGoodBackend(GoodBackend):
    pass


class TestBackendThatCaptures(GoodBackend):
    backend = ReplayingBackend()


class TestBackendWithoutClock(GoodBackend):
    backend = NoTimeBackend()
