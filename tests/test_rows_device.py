"""On a GPU: batches by captured steps of several rows give the tokens of single rows; what a step of 2, 4 and 8 rows takes (pytest -s)."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"
PROMPTS = [[5, 6, 7], [9], list(range(20, 60)), [3, 4], [11, 12, 13, 14], [7] * 9, [8, 9], [10, 3, 10]]
LAYERS = {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
          "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 8192}

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def model() -> Any:
    """The tiny model in fp32."""
    import agentcompile_core as ac
    from agentcompile_core.configuration import Config
    from agentcompile_core.store import Store

    found = ac.compile(str(TINY), dtype="float32", config=Config(budget_plans=12, budget_s=20.0, rounds=1), store=Store(None))
    found.context.close()
    return found


def generated(model: Any, prompts: Any, when: str, **options: Any) -> torch.Tensor:
    """What ``generate`` makes of a batch with steps of several rows always or never."""
    model.session.rows.when = when
    return model.generate(prompts, pad_token_id=0, **options)


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 8, 7])
def test_rows_have_the_tokens_of_single_rows(model: Any, rows: int) -> None:
    free = {"max_new_tokens": 40, "eos_token_id": None}
    wanted = generated(model, PROMPTS[:rows], "never", **free)
    assert torch.equal(generated(model, PROMPTS[:rows], "always", **free), wanted)
    ended = {"max_new_tokens": 40, "eos_token_id": sorted({int(wanted[0, -30]), int(wanted[1, -11])})}
    assert torch.equal(generated(model, PROMPTS[:rows], "always", **ended), generated(model, PROMPTS[:rows], "never", **ended))
    assert not model.session.rows.notes


def test_steps_are_captured_and_replayed_after_other_requests(model: Any) -> None:
    free = {"max_new_tokens": 20, "eos_token_id": None}
    first = generated(model, PROMPTS[:4], "always", **free)
    generated(model, PROMPTS[4:6], "never", **free)
    model.generate(PROMPTS[2], max_new_tokens=9, eos_token_id=None)
    step = model.session.rows._made[4, "decode"]
    assert getattr(step.run, "captured", True), step.run.reason
    assert not step.bound.uncapturable
    assert torch.equal(generated(model, PROMPTS[:4], "always", **free), first)


def test_time_of_a_step_beside_single_steps() -> None:
    """Layers of Qwen3-1.7B with random weights, half precision; what is measured decides, and a batch takes less than its rows."""
    import transformers

    import agentcompile_core as ac
    from agentcompile_core.store import Store

    with torch.device("cuda"):
        module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen3", **LAYERS), dtype=torch.float16)
    model = ac.compile(module.eval(), max_context=4096, budget_s=60, store=Store(None))
    model.context.close()
    prompts = [[5 + row, *range(10, 138)] for row in range(8)]
    for rows in (2, 4, 8):
        taken = {}
        for when in ("measured", "never"):
            generated(model, prompts[:rows], when, max_new_tokens=40, eos_token_id=None)  # captures, compares, measures
            torch.cuda.synchronize()
            began = time.perf_counter()
            generated(model, prompts[:rows], when, max_new_tokens=129, eos_token_id=None)
            torch.cuda.synchronize()
            taken[when] = time.perf_counter() - began
        step = model.session.rows._made.get((rows, "decode"))
        assert step is not None, model.session.rows.notes
        together, single = step.seconds
        print(f"{rows} rows: a step {1e6 * together:.0f} us, {rows} single steps {1e6 * rows * single:.0f} us; "
              f"128 steps of a batch {taken['measured']:.3f} s, row after row {taken['never']:.3f} s")
        assert taken["measured"] < 1.1 * taken["never"]
    assert not model.session.rows.notes, model.session.rows.notes
