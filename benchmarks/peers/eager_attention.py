"""With which of torch's libraries of attention eager is at its best.

Where torch asks cuDNN first (compute capability 9.0 and 10.0), that prepares itself for each number of keys that a process has not seen,
and eager has another one at every step.
"""

from collections.abc import Callable
from typing import Any

import torch

from agentcompile_core.report import bench

FIRST = 200  # tokens of a prompt whose steps, the first ones of the process, are not counted
PROMPTS = ((True, 72), (False, 136))  # with cuDNN or without, and tokens of the prompt: steps have lengths that no other one had
STEPS = 16
GAIN = 1.05  # so much faster it has to be without


def choose(module: Any, switch: Callable[[bool], None] = torch.backends.cuda.enable_cudnn_sdp) -> dict[str, Any]:
    """Have SDPA ask cuDNN or not, by ``switch``, whichever makes steps at new lengths faster; which it is, and milliseconds of a step."""
    step_ms = {}

    def behind(length: int) -> Callable[[int], Any]:
        ids = bench.random_prompt(module.config.get_text_config().vocab_size, length, seed=length)
        return bench.framework(module, ids, 0, "eager")

    behind(FIRST)(3)
    for asked, length in PROMPTS:
        switch(asked)
        run = behind(length)
        run(1)
        first_ms = bench.timed(lambda run=run: run(1))  # type: ignore[misc]
        step_ms[asked] = (bench.timed(lambda run=run: run(1 + STEPS)) - first_ms) / STEPS  # type: ignore[misc]
    asks = step_ms[True] <= GAIN * step_ms[False]
    switch(asks)
    return {"asks_cudnn": asks, "step_ms_with_cudnn": step_ms[True], "step_ms_without_cudnn": step_ms[False]}
