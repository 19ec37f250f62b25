"""The conformance kit refuses every planted defect for the stated reason, and passes a family without one."""

import itertools

import pytest
from agentcompile_cuda_kit import make_source
from agentcompile_cuda_kit.targets import PRESETS
from agentcompile_rules_transformers.testing import (
    argmax_case,
    attention_case,
    elementwise_case,
    gated_case,
    gather_case,
    linear_case,
    norm_case,
    rope_case,
    rope_table_case,
)

from agentcompile_core.errors import BuildError, Reject
from agentcompile_core.ir.candidate import Launch, Resources, StepSource, i32, pointer
from agentcompile_core.ir.graph import DType
from agentcompile_core.ir.plan import Parameter, Schedule, ScheduleSpace
from agentcompile_core.ir.region import Access, Role
from agentcompile_core.plugin.interfaces import TemplateFamily
from agentcompile_core.testing import conformance
from agentcompile_core.testing.conformance import TemplateFamilyConformance

CASES = (elementwise_case(columns=37, rows=2, operators=("add",), dtype=DType.F32),)
CODE = """
#include "plan.cuh"
extern "C" __global__ void add_kernel(const float* in0, const float* in1, float* out, int count) {
  int i = blockIdx.x * Plan::threads + threadIdx.x;
  BEFORE
  if (i < count BOUND) out[i] = RESULT;
}
"""


class Adds(TemplateFamily):
    """Adds two full fp32 inputs; what its subclasses change is their defect."""

    name = "adds"
    before, bound, result = "", "", "in0[i] + in1[i]"
    threads = (64, 32)

    def accepts(self, match, target):
        if match.kind != "elementwise" or match.need("out").spec.dtype is not DType.F32:
            return Reject(f"adds serves float32 elementwise matches, not {match.kind}")
        return True

    def space(self, match, target):
        return ScheduleSpace(parameters=(Parameter(name="threads", values=self.threads),),
                             points=tuple(Schedule({"threads": n}) for n in self.threads))

    def arguments(self, match):
        return (pointer("in0", Role.INPUT, DType.F32), pointer("in1", Role.INPUT, DType.F32),
                pointer("out", Role.OUTPUT, DType.F32, Access.WRITE), i32("count", match.integer("count")))

    def lower(self, match, schedule, target) -> StepSource:
        threads = schedule.integer("threads")
        launch = Launch(entry="add_kernel", grid=(-(-match.integer("count") // threads), 1, 1), block=(threads, 1, 1),
                        arguments=self.arguments(match))
        code = CODE.replace("BEFORE", self.before).replace("BOUND", self.bound).replace("RESULT", self.result)
        return make_source(code, plan={"threads": threads}, launches=(launch,))


def kit(family: TemplateFamily, **attributes) -> TemplateFamilyConformance:
    return type("Kit", (TemplateFamilyConformance,), {"family": family, "cases": CASES, "samples": 1, **attributes})()


STATIC = ("test_identity", "test_accepts_and_explains", "test_space_is_bounded_and_repeatable",
          "test_lowering_is_pure_and_fits_the_target")


def test_a_family_without_defect_passes_the_static_tier() -> None:
    good = kit(Adds(), rejected=(gather_case(columns=8, vocabulary=9),))
    for name in STATIC:
        getattr(good, name)()


class NonRepeatableSpace(Adds):
    turn = itertools.count()

    def space(self, match, target):
        turned = self.threads[:: -1 if next(self.turn) % 2 else 1]
        return ScheduleSpace(parameters=(Parameter(name="threads", values=self.threads),),
                             points=tuple(Schedule({"threads": n}) for n in turned))


class TooLargeSpace(Adds):
    threads = tuple(range(1, 258))


class EmptySpace(Adds):
    threads = ()


class RepeatedPoint(Adds):
    threads = (64, 64)


class UndeclaredValue(Adds):
    def space(self, match, target):
        return ScheduleSpace(parameters=(Parameter(name="threads", values=(64,)),), points=(Schedule({"threads": 128}),))


class WrongRole(Adds):
    def arguments(self, match):
        _, *rest = super().arguments(match)
        return (pointer("in0", Role.WEIGHT, DType.F32), *rest)


class WrongType(Adds):
    def arguments(self, match):
        _, *rest = super().arguments(match)
        return (pointer("in0", Role.INPUT, DType.F16), *rest)


class WritesInput(Adds):
    def arguments(self, match):
        _, *rest = super().arguments(match)
        return (pointer("in0", Role.INPUT, DType.F32, Access.READ_WRITE), *rest)


class ForgetsOutput(Adds):
    def arguments(self, match):
        return tuple(a for a in super().arguments(match) if a.name != "out")


class TooManyThreads(Adds):
    threads = (2048,)


class TooMuchSharedMemory(Adds):
    def lower(self, match, schedule, target):
        from attrs import evolve

        source = super().lower(match, schedule, target)
        return evolve(source, launches=(evolve(source.launches[0], shared_bytes=1 << 20),))


class ImpureLowering(Adds):
    turn = itertools.count()

    @property
    def result(self):
        return f"in0[i] + in1[i] + 0.0f * {next(self.turn)}"


class SameDigest(Adds):
    def lower(self, match, schedule, target):
        from attrs import evolve

        source = super().lower(match, schedule, target)
        launch = evolve(source.launches[0], entry="add_kernel_0")
        return evolve(source, digest="0", code=source.code.replace(source.digest, "0") + f"// {schedule}", launches=(launch,))


class BadName(Adds):
    name = "Adds-Fast"


class BadVersion(Adds):
    version = True


class TooPolite(Adds):
    def accepts(self, match, target):
        return True


class Mute(Adds):
    def accepts(self, match, target):
        answer = super().accepts(match, target)
        return answer if answer is True else Reject("no")


class SaysFalse(Adds):
    def accepts(self, match, target):
        return super().accepts(match, target) is True


class TakesNothing(Adds):
    def accepts(self, match, target):
        return Reject("this family serves nothing at all")


@pytest.mark.parametrize("family,test,reason", [
    (NonRepeatableSpace, 2, "another answer the second time"),
    (TooLargeSpace, 2, "257 points; at most 256"),
    (EmptySpace, 2, "no schedule is legal"),
    (RepeatedPoint, 2, "lists a schedule twice"),
    (UndeclaredValue, 2, "threads=128, which its parameters do not list"),
    (WrongRole, 3, "argument in0 has the role weight; operand in0 has input"),
    (WrongType, 3, "argument in0 has the dtype float16"),
    (WritesInput, 3, "writes operand in0, which may only be read"),
    (ForgetsOutput, 3, "no launch writes output out"),
    (TooManyThreads, 3, "1024 threads"),
    (TooMuchSharedMemory, 3, "1048576 bytes of shared memory; h200 allows"),
    (ImpureLowering, 3, "another source the second time"),
    (SameDigest, 3, "digest 0 names another text"),
    (BadName, 0, "bad name 'Adds-Fast'"),
    (BadVersion, 0, "bad version True"),
    (TooPolite, 1, "expected a Reject"),
    (Mute, 1, "says too little"),
    (SaysFalse, 1, "expected a Reject"),
    (TakesNothing, 1, "expected True"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_static_defects_are_refused_for_their_reason(family: type[Adds], test: int, reason: str) -> None:
    broken = kit(family(), rejected=(gather_case(columns=8, vocabulary=9),))
    with pytest.raises(AssertionError, match=reason):
        getattr(broken, STATIC[test])()
    for earlier in STATIC[:test]:
        getattr(broken, earlier)()  # nothing else is wrong with it


def test_no_cases_are_no_evidence() -> None:
    with pytest.raises(AssertionError, match="cases is empty"):
        kit(Adds(), cases=()).test_identity()


class OutOfBounds(Adds):
    bound = "+ 1"


class WrongResult(Adds):
    result = "in0[i] + in1[i] * 1.001f"


class UnwrittenTail(Adds):
    bound = "- 1"


class Racy(Adds):
    """Right by luck where threads run one after the other: a barrier is missing between write and read."""

    before = "__shared__ float shared[65]; shared[threadIdx.x + 1] = i < count ? in0[i] : 0.0f;"
    result = "in0[i] + in1[i] + (threadIdx.x ? shared[threadIdx.x] - in0[i - 1] : 0.0f)"


class Crashes(Adds):
    result = "*(const volatile float*)8ull"


@pytest.mark.parametrize("family,reason", [
    (Adds, ""),
    (OutOfBounds, r"memory_fault in case .*: kernel add_kernel_\w+, block \(1,0,0\) thread \(10,0,0\): out of bounds: read of 4 bytes, "
                  r"0 bytes past the end of argument 'in0' \(element 74\)"),
    (WrongResult, "tolerance.*elements beyond the budget"),
    (UnwrittenTail, "tolerance.*1 of 74 elements beyond the budget; element 73 is nan"),
    (Racy, r"race in case .*: kernel add_kernel_\w+, block \(0,0,0\) thread \(\d+,0,0\): race: static shared memory at byte"),
    (Crashes, r"memory_fault in case .*: kernel add_kernel_\w+, block \(0,0,0\) thread \(0,0,0\): out of bounds"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_wrong_kernels_are_refused_on_the_emulator(family: type[Adds], reason: str) -> None:
    subject = kit(family())
    for name in STATIC:
        getattr(subject, name)()  # none of these defects can be seen without running it
    if not reason:
        subject.test_emulated_results()
        return
    with pytest.raises(AssertionError, match=f"(?s)threads=64.*on emulation: ({reason})"):
        subject.test_emulated_results()


class NoCompile(Adds):
    result = "in2[i]"


@pytest.mark.compile
def test_a_schedule_that_does_not_compile_is_refused() -> None:
    kit(Adds()).test_sampled_schedules_build()
    with pytest.raises(AssertionError, match=r"(?s)does not build with .* for sm_90:.*in2"):
        kit(NoCompile()).test_sampled_schedules_build()


class SpillingBackend:
    """A backend whose every kernel spills, and that can be told to be unable."""

    name, device, languages, features, emulated = "spilling", "cuda", ("cuda",), (), False

    def __init__(self, answer=True) -> None:
        self.answer = answer

    def can_build(self, target):
        return self.answer

    available = property(lambda self: lambda: self.answer)

    def check(self, source, target):
        pass

    def build(self, source, target, deadline_s=120.0):
        if self.answer is not True:
            raise BuildError("unable")
        return type("Kernel", (), {"resources": Resources(registers=255, spill_bytes=16)})()


def test_spills_are_refused_and_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = {"backends": {"x/spilling": SpillingBackend()}, "validators": {}, "targets": {"cuda/h200": PRESETS["h200"]},
               "backend_of": lambda self, target: next(iter(self.backends.values()))}
    catalog = type("Catalog", (), offered)()
    monkeypatch.setattr(conformance, "_catalog", lambda: catalog)
    with pytest.raises(AssertionError, match="spills 16 bytes of registers on sm_90"):
        kit(Adds()).test_sampled_schedules_build()
    catalog.backends = {"x/spilling": SpillingBackend(Reject("no compiler was found"))}
    with pytest.raises(pytest.skip.Exception, match=r"no installed backend builds this for sm_90 \(spilling: no compiler was found\)"):
        kit(Adds()).test_sampled_schedules_build()
    with pytest.raises(pytest.skip.Exception, match=r"runs cuda kernels on hardware works here \(spilling: no compiler"):
        kit(Adds()).test_device_results()
    with pytest.raises(pytest.skip.Exception, match="no backend that emulates cuda kernels works here"):
        kit(Adds()).test_emulated_results()


def test_cases_are_what_the_rules_make_of_a_model() -> None:
    pairs = {
        "gather": gather_case(columns=8, vocabulary=11, rows=3), "norm": norm_case(columns=8, norm="layer", residual=True),
        "linear": linear_case(n=8, k=16, norm="rms", bias=True, activation="silu", residual=True), "siblings": linear_case(n=(8, 4), k=16),
        "gated": gated_case(n=8, k=16, norm="rms"), "elementwise": elementwise_case(columns=8), "rope": rope_case(heads=2, head_dim=8),
        "rope_table": rope_table_case(half=4), "argmax": argmax_case(n=9, advance=True),
        "attention": attention_case(heads=(4, 2), head_dim=8, capacity=16, rope="rms"),
    }
    for match, graph in pairs.values():
        assert {node.name for node in graph.nodes} == set(match.nodes)
        assert {v for o in match.operands for v in o.values} <= set(graph.by_name)
    assert [o.name for o in pairs["linear"][0].operands] == ["x", "weight", "norm_weight", "aux0", "aux1", "out"]
    assert pairs["siblings"][0].need("weight").spec.shape == (12, 16)
    assert pairs["gated"][0].integer("pair") == 2 and pairs["gated"][0].text("norm") == "rms"
    assert pairs["attention"][0].flag("rope") and pairs["attention"][0].flag("qk_norm")
    assert pairs["norm"][0].operand("residual_out") is not None and pairs["argmax"][0].flag("advance")
