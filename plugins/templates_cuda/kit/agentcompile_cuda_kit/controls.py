"""The standard control of validators in CUDA: one tiny kernel whose last argument plants a defect, so that one build serves all."""

from agentcompile_core.plugin_api import StepSource, control_source

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


def control(defect: str) -> StepSource:
    """The control with ``defect`` planted; empty: the right one."""
    return control_source(CODE, defect, language="cuda", grid=3, block=128)
