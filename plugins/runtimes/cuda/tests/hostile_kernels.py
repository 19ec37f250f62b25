"""Kernels that a validator must never let through, all of one matrix-vector product: out = w x, one thread per row."""

from typing import Any, Literal

from attrs import frozen

from agentcompile_core.plugin_api import (
    LINEAR,
    Access,
    Case,
    Cause,
    DType,
    Feature,
    Graph,
    GraphKind,
    InputFamily,
    Launch,
    Match,
    Node,
    Operand,
    Parameter,
    Ref,
    Reject,
    Role,
    Schedule,
    ScheduleSpace,
    SemanticLabel,
    StepSource,
    Target,
    TemplateFamily,
    TensorSpec,
    Trial,
    Value,
    ValueKind,
    i32,
    pointer,
    source_digest,
)

ROWS, COLUMNS, THREADS = 256, 512, 64
CODE = """
#include <agentcompile/ptx.cuh>
#include <cuda_fp16.h>
__device__ unsigned launches_@;
__device__ int have_@;
__device__ const __half* seen_@;
__device__ __half kept_@[4096];
extern "C" __global__ void hostile_@(const __half* x, const __half* w, __half* out, int n, int k) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  BEFORE
  if (row >= n) return;
  SUM sum = 0.0f;
  for (int i = FIRST; i < k; ++i) sum = ADD;
  __half result = __float2half((float)sum);
  AFTER
  out[row] = result;
}
"""
PARTS = {"BEFORE": "", "SUM": "float", "FIRST": "0", "AFTER": "",
         "ADD": "sum + __half2float(x[i]) * __half2float(w[(long long)row * k + i])"}
SHARED = 400 << 10  # bytes per block that no device has


@frozen(kw_only=True)
class Hostile:
    """One of them: what it replaces in the honest text, and for what it must be refused."""

    parts: tuple[tuple[str, str], ...] = ()
    causes: tuple[Cause, ...] = (Cause.TOLERANCE,)
    message: str = ""
    pdl: bool = False
    emulated: bool = True  # whether the emulator can run it within the process of a test


def _of(message: str = "", *causes: Cause, emulated: bool = True, pdl: bool = False, **parts: str) -> Hostile:
    return Hostile(parts=tuple(parts.items()), causes=causes or (Cause.TOLERANCE,), message=message, emulated=emulated, pdl=pdl)


FILLED = "const float old = __half2float(out[row]); if (old == old && old != 777.0f && old != -333.0f) return;"
HOSTILE = {
    "reads out of bounds": _of("", Cause.MEMORY_FAULT, emulated=False, BEFORE="if (x[1LL << 36] == w[0]) return;"),
    "traps": _of("", Cause.CRASH, emulated=False, BEFORE="if (n > 0) __trap();"),
    "misaligned": _of("misaligned", Cause.MISALIGNED, emulated=False,
                      BEFORE="if (*(volatile const unsigned long long*)((const char*)w + 2) == 42ULL) return;"),
    "loops forever": _of("within", Cause.TIMEOUT, emulated=False, BEFORE="while (((volatile unsigned short*)out)[0] != 0x1234) {}"),
    "too much shared memory": _of("shared", Cause.SHARED_MEMORY, emulated=False,
                                  BEFORE=f"__shared__ volatile char big[{SHARED}]; big[threadIdx.x] = 1; if (big[n] == 5) return;"),
    "never waits": _of("never waits", Cause.CONTRACT, emulated=False, pdl=True),
    "writes nothing": _of("nan", BEFORE="if (n > 0) return;"),
    "writes past the end": _of("wrote outside: out", Cause.MEMORY_FAULT, AFTER="if (row == n - 1) out[n] = result;"),
    "changes its input": _of("changed: x", Cause.MEMORY_FAULT, AFTER="if (row == n - 1) ((__half*)x)[k - 1] = result;"),
    "keeps its first result": _of("", AFTER="if (have_@) result = kept_@[row]; else kept_@[row] = result; if (row == n - 1) have_@ = 1;"),
    "keeps results by address": _of("", AFTER="if (seen_@ == x) result = kept_@[row]; else kept_@[row] = result; "
                                              "if (row == n - 1) seen_@ = x;"),
    "stops working": _of("stopped doing its work", BEFORE="if (launches_@ > STOP) return; if (row == n - 1) atomicAdd(&launches_@, 1u);"),
    "returns when out is filled": _of("does not look at its inputs again", BEFORE="if (row >= n) return; " + FILLED),
    "drops one element": _of("beyond the budget", FIRST="1"),
    "accumulates in fp16": _of("beyond the budget", SUM="__half", ADD="__hadd(sum, __hmul(x[i], w[(long long)row * k + i]))"),
}
FAMILY = "hostile/hostile"


def source(name: str, rows: int = ROWS, columns: int = COLUMNS, stop: int = 300) -> StepSource:
    """The kernel called ``name``, or the honest one; ``stop``: after how many launches the one that stops does."""
    hostile = HOSTILE.get(name, Hostile())
    text = CODE
    for part, said in {**PARTS, **dict(hostile.parts)}.items():
        text = text.replace(part, said)
    text = text.replace("STOP", f"{stop}u")
    digest = source_digest(text, (), language="cuda")
    arguments = (pointer("x", Role.INPUT, DType.F16), pointer("w", Role.WEIGHT, DType.F16, operand="weight"),
                 pointer("out", Role.OUTPUT, DType.F16, Access.WRITE), i32("n", rows), i32("k", columns))
    launch = Launch(entry=f"hostile_{digest}", grid=(-(-rows // THREADS), 1, 1), block=(THREADS, 1, 1), arguments=arguments,
                    pdl=hostile.pdl)
    features = (Feature.GRIDDEPCONTROL,) if hostile.pdl else ()
    return StepSource(digest=digest, code=text.replace("@", digest), features=features, launches=(launch,), reduction_depth=columns)


def trial(name: str, target: Target, stop: int = 300) -> Trial:
    """A trial of one of them."""
    x, w, out = ((1, 1, COLUMNS), (ROWS, COLUMNS), (1, 1, ROWS))
    specs = {n: TensorSpec(shape=shape, dtype=DType.F16) for n, shape in (("x", x), ("weight", w), ("out", out))}
    values = (Value(name="x", spec=specs["x"], kind=ValueKind.INPUT), Value(name="weight", spec=specs["weight"], kind=ValueKind.WEIGHT),
              Value(name="out", spec=specs["out"]))
    node = Node(name="linear", op="aten.linear.default", kind="linear", args=(Ref("x"), Ref("weight")), outputs=("out",))
    graph = Graph(name="product", kind=GraphKind.FORWARD, values=values, nodes=(node,), inputs=("x",), outputs=("out",))
    roles = (("x", Role.INPUT, Access.READ), ("weight", Role.WEIGHT, Access.READ), ("out", Role.OUTPUT, Access.WRITE))
    operands = tuple(Operand(name=n, role=r, access=a, values=(n,), spec=specs[n]) for n, r, a in roles)
    match = Match(kind=LINEAR, label=SemanticLabel.GEMV, nodes=("linear",), operands=operands,
                  attributes=(("n", ROWS), ("k", COLUMNS), ("norm", "none"), ("norm_eps", 0.0), ("pair", 1)))
    cases = (Case(family=InputFamily.NORMAL, seed=1), Case(family=InputFamily.INTEGERS, seed=2))
    return Trial(match=match, graph=graph, source=source(name, stop=stop), target=target, cases=cases)


class HostileFamily(TemplateFamily):
    """Offers all of them, and the honest one last."""

    name = "hostile"

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """Plain products in half precision."""
        plain = match.kind == LINEAR and match.epilogue is None and {o.name for o in match.operands} == {"x", "weight", "out"}
        return True if plain and match.need("x").spec.dtype is DType.F16 else Reject("no plain product in fp16")

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """One schedule per kernel."""
        names = (*HOSTILE, "honest")
        return ScheduleSpace(parameters=(Parameter(name="kernel", values=names),), points=tuple(Schedule({"kernel": n}) for n in names))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """Its text."""
        return source(str(schedule["kernel"]), match.integer("n"), match.integer("k"))


def offers() -> Any:
    """A plugin with the family."""
    from types import SimpleNamespace

    from agentcompile_core.plugin_api import hookimpl

    return SimpleNamespace(agentcompile_template_families=hookimpl(lambda: [HostileFamily()]))
