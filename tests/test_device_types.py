"""On a GPU: prompts of any model type in half precision, wide enough for the device's own kernels, are as near to fp32 as the framework's.

A run draws some types by its day; TYPES=all takes every one, TYPES=gemma2,phi3 those.
"""

import copy
import datetime
import inspect
import math
import os
import random
import statistics
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

AGAIN = 8  # further prompts of a length where one is further off: of experts, a router's last bit decides
DRAWN, WIDER, CHUNKS = 12, 8, (64, 1024)  # chunks below and above the rows from which on gated products are one
LENGTHS = (1, 5, 64, 130, 500, 1100, 2000)


def types() -> list[str]:
    """What this run looks at."""
    from covered import models

    wanted, known = os.environ.get("TYPES", ""), sorted(models.covered(True))
    if wanted and wanted != "all":
        return wanted.split(",")
    return known if wanted else sorted(random.Random(datetime.date.today().toordinal()).sample(known, DRAWN))


def pair(name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A model in half precision and one in fp32 of the same numbers, both on the GPU."""
    from covered import models
    from covered.special import SPECIAL

    wide = models.tiny(name, SPECIAL.get(name, {}), 1.0, WIDER)
    half = copy.deepcopy(wide).to(dtype)
    wide.load_state_dict({key: tensor.float() for key, tensor in half.state_dict().items()})
    return half.cuda(), wide.cuda()


def error(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((logits.float() - wanted).square().mean().sqrt())


def counted(model: nn.Module, length: int) -> dict[str, torch.Tensor]:
    """Positions from zero on, as ``generate`` gives them: RoBERTa's own forward counts from another number."""
    given = "position_ids" in inspect.signature(model.forward).parameters
    return {"position_ids": torch.arange(length, device="cuda")[None]} if given else {}


def near(found: list[tuple[float, float]]) -> bool:
    """Whether our errors are no larger than the framework's: in the middle of all prompts, and at the worst no more than a router's other
    choice makes of one."""
    ours, theirs = zip(*found, strict=True)
    return statistics.median(ours) <= 1.5 * statistics.median(theirs) + 1e-4 and max(ours) <= (0.5 if len(found) > 1 else math.inf)


@pytest.mark.parametrize("name", types() if torch.cuda.is_available() else [])
def test_prompts_are_as_near_to_fp32_as_the_frameworks(name: str) -> None:
    import agentcompile_core as ac
    from agentcompile_core.ir.graph import DType, Workload
    from agentcompile_core.stages.capture.describe import limit_of, text_config
    from agentcompile_core.store import Store

    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = (torch.float16, torch.bfloat16)[zlib.crc32(name.encode()) % 2]
    try:
        half, wide = pair(name, dtype)
    except ValueError as exc:
        pytest.skip(f"no wider configuration: {' '.join(str(exc).split())[:200]}")
    limit = min(2048, limit_of(text_config(half)) or 512)
    chunks = tuple(sorted({min(chunk, limit) for chunk in CHUNKS}))
    workload = Workload(dtype=DType(str(dtype).removeprefix("torch.")), max_context=limit, prefill_chunks=chunks)
    options: dict[str, Any] = {"origins": [], "validators": (), "store": Store(None), "device": "cuda"}
    mine = ac.compile(half, workload, **options)
    if mine.graphs.eager_reason:
        pytest.skip(mine.graphs.eager_reason)
    def errors(length: int, draw: int) -> tuple[float, float]:
        """Of our logits and of the framework's behind one prompt, as shares of how far logits are apart."""
        ids = torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length + 10_000 * draw))
        with torch.inference_mode():
            wanted, theirs = (model(ids.cuda(), use_cache=False, **counted(model, length)).logits[0, -1].float() for model in (wide, half))
            ours = mine.session.prefill(ids).output(0)[0, -1]
        return tuple(error(one, wanted) / float(wanted.std()) for one in (ours, theirs))  # type: ignore[return-value]

    for length in (n for n in LENGTHS if n < limit):
        found = [errors(length, 0)]
        if not near(found):
            found += [errors(length, draw) for draw in range(1, 1 + AGAIN)]
        assert near(found), (length, found)
