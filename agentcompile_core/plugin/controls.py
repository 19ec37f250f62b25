"""The standard control of validators: out[i] = in0[i] + in1[i] in float32, right or with a known defect, by any backend.

A backend gives the source (``Backend.control``); match, cases and what must be found wrong are the same everywhere.
"""

from collections.abc import Sequence

from ..ir.candidate import Launch, StepSource, Workspace, i32, pointer
from ..ir.graph import DType, Graph, GraphKind, Node, Ref, TensorSpec, Value, ValueKind
from ..ir.region import Access, Match, Operand, Role, SemanticLabel
from ..ir.target import Target
from ..ir.verdict import Case, InputFamily, Trial

CONTROL_COUNT = 333
CONTROL_DIGEST = "c0n7r015"
CONTROL_ENTRY = f"control_kernel_{CONTROL_DIGEST}"
# What the launch's last argument plants, from 1 on: sum * 1.001 at one element; the last element left as it was; out[count]
# written; in0 changed; the workspace left dirty; what out held before added as * 0.
CONTROL_DEFECTS = ("wrong value", "unwritten element", "write behind the end", "input changed", "workspace left dirty", "garbage kept")


def control_source(code: str, defect: str, *, language: str, grid: int = 1, block: int = 1) -> StepSource:
    """``code`` as the control.

    Its entry is ``CONTROL_ENTRY(float* in0, const float* in1, float* out, int* scratch, int count, int defect)``.

    ``defect`` is one of CONTROL_DEFECTS, or empty for the right one; ``grid`` and ``block`` are those of one launch.
    """
    number = CONTROL_DEFECTS.index(defect) + 1 if defect else 0
    arguments = (
        pointer("in0", Role.INPUT, DType.F32), pointer("in1", Role.INPUT, DType.F32),
        pointer("out", Role.OUTPUT, DType.F32, Access.WRITE), pointer("scratch", Role.WORKSPACE, DType.I32, Access.READ_WRITE),
        i32("count", CONTROL_COUNT), i32("defect", number),
    )
    launch = Launch(entry=CONTROL_ENTRY, grid=(grid, 1, 1), block=(block, 1, 1), arguments=arguments)
    return StepSource(language=language, digest=CONTROL_DIGEST, code=code, launches=(launch,),
                      workspaces=(Workspace(name="scratch", nbytes=64, zeroed=True),))


def control_trials(sources: Sequence[StepSource], target: Target) -> tuple[Trial, ...]:
    """A trial of each source, on normal and on integer inputs."""
    spec = TensorSpec(shape=(CONTROL_COUNT,), dtype=DType.F32)
    values = (Value(name="a", spec=spec, kind=ValueKind.INPUT), Value(name="b", spec=spec, kind=ValueKind.INPUT),
              Value(name="sum", spec=spec))
    node = Node(name="add", op="aten.add.Tensor", kind="add", args=(Ref("a"), Ref("b")), outputs=("sum",))
    graph = Graph(name="control", kind=GraphKind.FORWARD, values=values, nodes=(node,), inputs=("a", "b"), outputs=("sum",))
    operands = (
        Operand(name="in0", role=Role.INPUT, access=Access.READ, values=("a",), spec=spec),
        Operand(name="in1", role=Role.INPUT, access=Access.READ, values=("b",), spec=spec),
        Operand(name="out", role=Role.OUTPUT, access=Access.WRITE, values=("sum",), spec=spec),
    )
    match = Match(kind="elementwise", label=SemanticLabel.ELEMENTWISE, nodes=("add",), operands=operands)
    cases = (Case(family=InputFamily.NORMAL, seed=11), Case(family=InputFamily.INTEGERS, seed=12))
    return tuple(Trial(match=match, graph=graph, source=source, target=target, cases=cases) for source in sources)
