"""Known good and known bad trials: one tiny kernel whose last argument plants a defect, so that one build serves all."""

from agentcompile_cuda_kit.targets import PRESETS

from agentcompile_core.plugin_api import (
    Access,
    Case,
    DType,
    Graph,
    GraphKind,
    InputFamily,
    Launch,
    Match,
    Node,
    Operand,
    Ref,
    Role,
    SemanticLabel,
    StepSource,
    TensorSpec,
    Trial,
    Value,
    ValueKind,
    Workspace,
    i32,
    pointer,
)

COUNT = 333
DIGEST = "c0n7r015"
DEFECTS = ("wrong value", "unwritten element", "write behind the end", "input changed", "workspace left dirty", "garbage kept")
CODE = """
extern "C" __global__ void control_kernel_c0n7r015(float* in0, const float* in1, float* out, int* scratch, int count, int defect) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (defect == 3 && i == count) out[i] = 1.0f;
  if (defect == 5 && i == 0) scratch[0] = 1;
  if (i >= count || (defect == 2 && i == count - 1)) return;
  float sum = in0[i] + in1[i];
  if (defect == 1 && i == 200) sum = sum * 1.001f;
  if (defect == 6 && i == 7) sum = sum + out[i] * 0.0f;
  out[i] = sum;
  if (defect == 4 && i == 5) in0[i] = sum;
}
"""


def control_trials() -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
    """The good trial, and one bad trial per defect."""
    return (_trial(0),), tuple(_trial(defect + 1) for defect in range(len(DEFECTS)))


def _trial(defect: int) -> Trial:
    spec = TensorSpec(shape=(COUNT,), dtype=DType.F32)
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
    return Trial(match=match, graph=graph, source=_source(defect), target=PRESETS["h200"], cases=cases)


def _source(defect: int) -> StepSource:
    arguments = (
        pointer("in0", Role.INPUT, DType.F32), pointer("in1", Role.INPUT, DType.F32),
        pointer("out", Role.OUTPUT, DType.F32, Access.WRITE), pointer("scratch", Role.WORKSPACE, DType.I32, Access.READ_WRITE),
        i32("count", COUNT), i32("defect", defect),
    )
    launch = Launch(entry=f"control_kernel_{DIGEST}", grid=(3, 1, 1), block=(128, 1, 1), arguments=arguments)
    return StepSource(digest=DIGEST, code=CODE, launches=(launch,), workspaces=(Workspace(name="scratch", nbytes=64, zeroed=True),))
