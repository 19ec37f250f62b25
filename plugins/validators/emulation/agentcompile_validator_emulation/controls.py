"""Known good and known bad trials of the validator: out = 2 * in, turned around in blocks by way of shared memory and back."""

from agentcompile_cuda_kit.targets import preset

from agentcompile_core.plugin_api import (
    ELEMENTWISE,
    Access,
    Case,
    DType,
    Feature,
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
    i32,
    pointer,
)

COUNT, THREADS = 1000, 128
DIGEST = "c0de{:012d}"
_SOURCE = r"""
#include <agentcompile/ptx.cuh>
extern "C" __global__ void __launch_bounds__(%(threads)d) twice_kernel_%(digest)s(const float* in, float* out, int count) {
  __shared__ float staged[%(threads)d];
  ac::launch_dependents();
  %(early)s
  const int last = %(threads)d - 1;
  const int turned = blockIdx.x * %(threads)d + last - threadIdx.x;
  staged[threadIdx.x] = turned < count ? in[turned] : 0.0f;
  %(barrier)s
  const int i = blockIdx.x * %(threads)d + threadIdx.x;
  if (i < count) out[%(index)s] = 2.0f * staged[last - threadIdx.x];
}
"""


def _source(number: int, *, early: str = "ac::grid_dependency_wait();", barrier: str = "__syncthreads();", index: str = "i") -> StepSource:
    digest = DIGEST.format(number)
    code = _SOURCE % {"threads": THREADS, "digest": digest, "early": early, "barrier": barrier, "index": index}
    arguments = (pointer("in", Role.INPUT, DType.F32, operand="in0"), pointer("out", Role.OUTPUT, DType.F32, Access.WRITE),
                 i32("count", COUNT))
    launch = Launch(entry=f"twice_kernel_{digest}", grid=(-(-COUNT // THREADS), 1, 1), block=(THREADS, 1, 1), pdl=True,
                    arguments=arguments)
    return StepSource(digest=digest, code=code, features=(Feature.GRIDDEPCONTROL,), launches=(launch,))


def _trial(source: StepSource) -> Trial:
    spec = TensorSpec(shape=(COUNT,), dtype=DType.F32)
    graph = Graph(name="control", kind=GraphKind.FORWARD, inputs=("in0",), outputs=("out",),
                  values=(Value(name="in0", spec=spec, kind=ValueKind.INPUT), Value(name="out", spec=spec)),
                  nodes=(Node(name="mul", op="aten.mul.Tensor", kind="mul", args=(Ref("in0"), 2.0), outputs=("out",)),))
    operands = (Operand(name="in0", role=Role.INPUT, access=Access.READ, values=("in0",), spec=spec),
                Operand(name="out", role=Role.OUTPUT, access=Access.WRITE, values=("out",), spec=spec))
    match = Match(kind=ELEMENTWISE, label=SemanticLabel.ELEMENTWISE, nodes=("mul",), operands=operands,
                  attributes=(("count", COUNT), ("columns", COUNT), ("broadcast0", "full")))
    return Trial(match=match, graph=graph, source=source, target=preset("h200"), cases=(Case(family=InputFamily.NORMAL, seed=1),))


def control_trials() -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
    """(good, bad). The bad ones give right values on most GPUs: only checks of the accesses themselves see the mistake."""
    good = _trial(_source(0))
    warp_barrier = _source(1, barrier="__syncwarp();")
    too_far = _source(2, index="i + (i == count - 1)")
    no_wait = _source(3, early="")
    return (good,), tuple(_trial(source) for source in (warp_barrier, too_far, no_wait))
