"""Stand-ins that behave badly on command: a backend whose "kernels" are Python, a family, a simple validator.

A fake source is text such as ``behave=honest us=3.0``. What it may do is listed in ``BEHAVIOURS`` (``fake_kernels``).
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from ..errors import BuildError, Cause, Reject
from ..ir.candidate import Kernel, Launch, StepSource, i32, pointer
from ..ir.graph import DType, Graph, GraphKind, Node, Ref, TensorSpec, Value, ValueKind
from ..ir.plan import Parameter, Schedule, ScheduleSpace
from ..ir.record import Measurement
from ..ir.region import Access, Match, Operand, Role, SemanticLabel
from ..ir.target import NO_TARGET, Target
from ..ir.verdict import Case, Check, InputFamily, Outcome, Trial, Verdict
from ..ops.reference import compare
from ..plugin.catalog import OFFERS, Catalog
from ..plugin.controls import control_trials
from ..plugin.interfaces import Backend, RegionRule, TemplateFamily, TrialRun, Validator
from ..plugin.match_kind import AttributeKind, MatchKind, OperandKind
from .fake_kernels import BEHAVIOURS, behave, without_work, word
from .targets import FAKE

FRAMEWORK_US = 10.0


class FakeBackend(Backend):
    """Runs sources that are words. Launch arguments: in0, in1, out (fp32) and the count.

    ``time`` reports the ``us`` of the last kernel that ran, or ``FRAMEWORK_US`` if none did.
    """

    name = "fake"
    device = "cpu"
    emulated = True
    window = 2

    def __init__(self) -> None:
        self.builds = 0
        self._us: float | None = None
        self._runs: dict[str, int] = {}
        self._kept: dict[int, bytes] = {}  # results by the address of the first input

    def available(self) -> Literal[True] | Reject:
        """Always."""
        return True

    def can_build(self, target: Target) -> Literal[True] | Reject:
        """Always."""
        return True

    def live_target(self) -> Target | None:
        """A made-up one, so that timings count."""
        return FAKE

    def compiler(self) -> str:
        """A constant."""
        return "fake 1"

    def build(self, source: StepSource, target: Target, deadline_s: float = 120.0) -> Kernel:
        """The text is the binary."""
        self.builds += 1
        if "behave=no_build" in source.code:
            raise BuildError("line 1: the fake compiler was told to refuse this")
        binary = source.code.encode()
        return Kernel(digest=source.digest, backend=self.name, arch=target.arch, binary=binary,
                      sha256=hashlib.sha256(binary).hexdigest(), compiler=self.compiler())

    def load(self, kernel: Kernel) -> str:
        """The text again."""
        return kernel.binary.decode()

    def prepare_launch(self, handle: Any, launch: Launch, arguments: Sequence[int | float], pdl: bool) -> Callable[[int], None]:
        """A run that does what the text says."""
        behaviour = word(handle, "behave", "honest")
        us = {"nan_time": float("nan"), "too_fast": 1e-9}.get(behaviour, float(word(handle, "us", "5.0")))

        def run(stream: int) -> None:
            self._us = us
            self._runs[handle] = self._runs.get(handle, 0) + 1
            done = without_work(behaviour, self._runs[handle], self._kept, *(int(a) for a in arguments))
            if not done:
                behave(behaviour, self._runs[handle], *(int(a) for a in arguments))

        return run

    def time(self, run: Callable[[int], None], *, repetitions: int, runs_per_repetition: int) -> "tuple[float, ...] | Reject":
        """Run once per run of one repetition and report what the text says."""
        self._us = None
        for _ in range(runs_per_repetition):
            run(0)
        us = FRAMEWORK_US if self._us is None else self._us
        return tuple(us * (1.0 + 0.001 * (i % 3)) for i in range(repetitions))


class ReplayingBackend(FakeBackend):
    """Stands for a device that captures: it warms up, runs nothing while it captures, and makes the captured runs at each replay.

    ``owners`` are those of its captures; with ``refuses`` nothing can be captured, for that reason.
    """

    captures = True

    def __init__(self, refuses: str = "") -> None:
        super().__init__()
        self.refuses, self.owners = refuses, list[object]()

    def capture(self, run: Callable[[], None], *, warm_ups: int = 0, runs: int = 1, owner: object = None) -> "Callable[[], None] | Reject":
        """As said above."""
        self.owners.append(owner)
        for _ in range(warm_ups):
            run()
        if self.refuses:
            return Reject(self.refuses)

        def replay() -> None:
            for _ in range(runs):
                run()

        return replay


FAKE_KIND = MatchKind(
    name="elementwise", doc="out[i] = in0[i] + in1[i]",
    operands=(OperandKind("in", repeated=True), OperandKind("out", (Role.OUTPUT,))),
    attributes=(AttributeKind("count"), AttributeKind("columns"), AttributeKind("broadcast", str, repeated=True)),
)


class FakeRule(RegionRule):
    """Finds nothing; offers the kind that the fake family serves."""

    name = "fake_rule"
    kinds = (FAKE_KIND,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """No match."""
        return ()


class FakeFamily(TemplateFamily):
    """Lowers ``elementwise`` matches; its schedules are the behaviours, honest ones first."""

    name = "fake_family"
    behaviours = tuple(BEHAVIOURS)

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """Only elementwise matches."""
        return True if match.kind == "elementwise" else Reject("the fake family adds, nothing else")

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """One point per behaviour."""
        points = tuple(Schedule({"behave": name, "us": 5.0}) for name in self.behaviours)
        parameters = (Parameter(name="behave", values=self.behaviours), Parameter(name="us", values=(5.0,)))
        return ScheduleSpace(parameters=parameters, points=points)

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """The words of the schedule."""
        return fake_source(str(schedule["behave"]), float(schedule["us"]), match.need("out").spec.numel)


def fake_source(behaviour: str, us: float = 5.0, count: int = 100) -> StepSource:
    """A source for ``FakeBackend``."""
    digest = hashlib.sha256(f"{behaviour} {us} {count}".encode()).hexdigest()[:12]
    arguments = (pointer("in0", Role.INPUT, DType.F32), pointer("in1", Role.INPUT, DType.F32),
                 pointer("out", Role.OUTPUT, DType.F32, Access.WRITE), i32("count", count))
    launch = Launch(entry=f"fake_{digest}", grid=(1, 1, 1), block=(128, 1, 1), arguments=arguments)
    return StepSource(digest=digest, code=f"behave={behaviour} us={us}", launches=(launch,), reduction_depth=1)


def fake_match(count: int = 100) -> tuple[Match, Graph]:
    """An addition of two fp32 vectors as a match, and its graph."""
    spec = TensorSpec(shape=(count,), dtype=DType.F32)
    values = (Value(name="a", spec=spec, kind=ValueKind.INPUT), Value(name="b", spec=spec, kind=ValueKind.INPUT),
              Value(name="sum", spec=spec))
    node = Node(name="add", op="aten.add.Tensor", kind="add", args=(Ref("a"), Ref("b")), outputs=("sum",))
    graph = Graph(name="addition", kind=GraphKind.DECODE, values=values, nodes=(node,), inputs=("a", "b"), outputs=("sum",))
    roles = (("in0", Role.INPUT, Access.READ, "a"), ("in1", Role.INPUT, Access.READ, "b"), ("out", Role.OUTPUT, Access.WRITE, "sum"))
    operands = tuple(Operand(name=n, role=r, access=a, values=(v,), spec=spec) for n, r, a, v in roles)
    attributes = (("broadcast0", "full"), ("broadcast1", "full"), ("columns", count), ("count", count))
    match = Match(kind="elementwise", label=SemanticLabel.ELEMENTWISE, nodes=("add",), operands=operands, attributes=attributes)
    return match, graph


def fake_trial(behaviour: str, us: float = 5.0, count: int = 100) -> Trial:
    """A trial of the fake addition."""
    match, graph = fake_match(count)
    cases = (Case(family=InputFamily.NORMAL, seed=1), Case(family=InputFamily.INTEGERS, seed=2))
    return Trial(match=match, graph=graph, source=fake_source(behaviour, us, count), target=FAKE, cases=cases)


class SimpleValidator(Validator):
    """Compares each case with the reference and looks at the guards."""

    name = "simple"

    def applies(self, trial: Trial) -> bool:
        """Every trial."""
        return True

    def controls(self, backend: Backend) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
        """A right kernel, and one that is wrong: the backend's own, else words."""
        right, wrong = backend.control(""), backend.control("wrong value")
        if right is None or wrong is None:
            return (fake_trial("honest"),), (fake_trial("wrong"),)
        good, bad = control_trials((right, wrong), NO_TARGET)
        return (good,), (bad,)

    def check(self, trial: Trial, run: TrialRun) -> Verdict:
        """The first thing that is wrong, if anything is."""
        checks = []
        for case in trial.cases:
            result = run.run(case, float("nan"))
            expected = run.expected(case, result.inputs)
            found = [compare(tensor, expected[name]) for name, tensor in run.values(result.outputs).items()]
            bad = result.detail or next((c.detail for c in found if not c.ok), "")
            checks.append(Check(name=case.family, outcome=Outcome.FAIL if bad else Outcome.PASS, detail=bad))
            if bad:
                return Verdict(validator=self.name, outcome=Outcome.FAIL, checks=tuple(checks), cause=Cause.TOLERANCE, message=bad)
        return Verdict(validator=self.name, outcome=Outcome.PASS, checks=tuple(checks))


class BrokenValidator(SimpleValidator):
    """Passes everything, its own bad control too."""

    name = "broken"

    def check(self, trial: Trial, run: TrialRun) -> Verdict:
        """Always a pass."""
        return Verdict(validator=self.name, outcome=Outcome.PASS)


class PickyValidator(SimpleValidator):
    """Judges winners only, and refuses every source whose ``us`` is below 4."""

    name = "picky"
    scope = "winner"

    def controls(self, backend: Backend) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
        """One that is slow enough, and one that is not."""
        return (fake_trial("honest"),), (fake_trial("honest", 3.0),)

    def check(self, trial: Trial, run: TrialRun) -> Verdict:
        """A look at the text."""
        good = float(word(trial.source.code, "us", "5.0")) >= 4.0
        return Verdict(validator=self.name, outcome=Outcome.PASS if good else Outcome.FAIL, cause=None if good else Cause.MEMORY_FAULT,
                       message="" if good else "a race that only this validator sees")


class NoTimeBackend(FakeBackend):
    """A backend that cannot time, like an emulator."""

    name = "no_time"
    clock = False

    def time(self, run: Callable[[int], None], *, repetitions: int, runs_per_repetition: int) -> "tuple[float, ...] | Reject":
        """Never."""
        return Reject("emulated kernels have no time")


def catalog() -> Catalog:
    """A catalog of these doubles; for a worker: ``catalog="agentcompile_core.testing.doubles:catalog"``."""
    made = Catalog()
    for offer in (FakeBackend(), NoTimeBackend(), FakeRule(), FakeFamily(), SimpleValidator(), BrokenValidator(), PickyValidator()):
        hook = next(hook for hook, kind in OFFERS.items() if isinstance(offer, kind))
        made.offers[hook][f"doubles/{offer.name}"] = offer
    return made


def measurement(us: float, spread_us: float = 0.01, floor_us: float = 0.0) -> Measurement:
    """A measurement of 25 repetitions."""
    return Measurement(us=us, spread_us=spread_us, repetitions=25, floor_us=floor_us)
