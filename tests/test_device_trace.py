"""On a GPU: a traced layer's phases come in order, its neighbours and its tokens are as before, and something is named as lost."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from agentcompile_core.errors import UsageError
from agentcompile_core.report import trace

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def compiled():  # type: ignore[no-untyped-def]
    import agentcompile_core as ac
    from agentcompile_core.configuration import Config
    from agentcompile_core.store import Store

    config = Config(budget_plans=60, budget_s=30.0, rounds=1, origins=("generated",))
    model = ac.compile(str(TINY), dtype="float16", config=config, store=Store(None))
    model.context.close()
    return model


@pytest.mark.parametrize("position", [1, 64, 300])
def test_phases_come_in_order_and_tokens_stay(compiled, position: int) -> None:  # type: ignore[no-untyped-def]
    ids = compiled.tokenizer("When an exception", return_tensors="pt").input_ids
    before = compiled.generate(ids, 100, eos_token_id=None)
    line = compiled.trace(position, repetitions=3)
    assert torch.equal(compiled.generate(ids, 100, eos_token_id=None), before)
    inside = [launch for launch in line.launches if launch.layer == line.layer]
    assert inside and any(launch.layer == line.layer + 1 for launch in line.launches)
    for launch in line.launches:
        phases = {times.phase: times for times in launch.phases}
        assert phases["start"].least_us <= phases["end"].least_us <= phases["end"].mean_us <= phases["end"].most_us
        if "released" in phases:
            assert phases["released"].mean_us <= phases["end"].mean_us + 0.1
    for one, other in pairwise(inside):
        assert one.at("end").mean_us < other.at("end").mean_us
    assert 0 < line.layer_us < line.token_us and line.losses and line.clock_ns > 0
    assert "largest losses" in trace.trace_text(line) and json.dumps(trace.trace_document(line)) and trace.trace_picture(line)
    assert line.noted_us < 2 * line.token_us


def test_what_is_not_there_is_refused(compiled) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match="position 100000 cannot be traced"):
        compiled.trace(100_000)
    with pytest.raises(UsageError, match="layer 99 has no generated kernels; allowed are 0 to"):
        compiled.trace(10, layer=99)
