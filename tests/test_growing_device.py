"""On a GPU: the tiny model over a cache that grows, through captured graphs that were there before, gives the tokens of a whole cache."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"
CONTEXT = 16_384  # of 512 bytes a position: four pieces of 2 MiB in each range
LENGTHS = [(3, 20), (4000, 200), (5, 9), (4090, 12), (8150, 100), (12_200, 120), (40, 30)]

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def compiled(folder: Path) -> Any:
    """The tiny model with more positions than it was trained on."""
    import agentcompile_core as ac
    from agentcompile_core.configuration import Config
    from agentcompile_core.store import Store

    config = Config(budget_plans=12, budget_s=20.0, rounds=1, kv_cache="flashkv")
    shutil.copytree(TINY, folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "max_position_embeddings": CONTEXT}))
    model = ac.compile(str(folder), dtype="float32", max_context=CONTEXT, config=config, store=Store(None))
    model.context.close()
    return model


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """(over a cache that grows by few positions, over one that is all there) of one compilation."""
    import agentcompile_runtime_flashkv as flashkv
    from agentcompile_runtime_flashkv import growing

    from agentcompile_core.installation.install import Runnable, install

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashkv, "SMALL_BYTES", 0)
        patch.setattr(flashkv, "SMALL_RANGE_BYTES", 0)
        patch.setattr(growing, "STEP", 64)
        model = compiled(tmp_path_factory.mktemp("models") / "tiny_model")
        assert isinstance(model.session.kv, growing.GrowingKVCacheManager) and model.session.kv._reserved is not None, model.notes
        patch.setattr(flashkv, "SMALL_BYTES", 1 << 40)
        found = model.compilation
        what = Runnable(graphs=model.graphs, programs=found.programs, kernels=found.kernels, provisional=found.provisional)
        whole, _ = install(model.loaded, what, "cuda", "auto", model.context, model.session._weights)
        assert not isinstance(whole.kv, growing.GrowingKVCacheManager)
        yield model, whole


def prompt_of(length: int) -> torch.Tensor:
    return torch.randint(2, 2000, (1, length), generator=torch.Generator().manual_seed(length))


def test_tokens_are_those_of_a_whole_cache_over_every_edge(both: tuple[Any, Any]) -> None:
    model, whole = both
    session = model.session
    places, steps = [t.data_ptr() for t in (*session.kv.keys, *session.kv.values)], dict(session._steps)
    held = [session.kv.held]
    for length, count in LENGTHS:
        prompt = prompt_of(length)
        assert torch.equal(session.generate(prompt, count), whole.generate(prompt, count))
        held.append(session.kv.held)
        assert held[-1] >= length + count
    assert held == sorted(held) and len(set(held)) >= 3, held
    assert [t.data_ptr() for t in (*session.kv.keys, *session.kv.values)] == places
    assert {name: session._steps[name] for name in steps} == steps, "no graph was captured again"
    assert all(getattr(step, "captured", True) for step in steps.values())


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "top_k": 8}, {"do_sample": True, "num_return_sequences": 2}],
                         ids=str)
def test_requests_of_transformers_are_those_of_a_whole_cache(both: tuple[Any, Any], options: dict[str, Any]) -> None:
    from agentcompile_core.runtime.generation.request import Asked, request
    from agentcompile_core.runtime.generation.serve import serve

    model, whole = both
    model.session.kv.give_back(100)
    assert model.session.kv.held == CONTEXT // 4
    found = []
    for session in (model.session, whole):
        asked = request(model.loaded.module, Asked(input_ids=prompt_of(4080), max_new_tokens=40, options={"eos_token_id": None, **options}),
                        model.graphs)
        torch.manual_seed(11)
        found.append(serve(model.loaded.module, session, asked, seed=None, streamer=None, say=lambda line: None).cpu())
    assert torch.equal(*found)


def test_teacher_forced_logits_are_the_same(both: tuple[Any, Any]) -> None:
    model, whole = both
    model.session.kv.give_back(0)
    tokens = prompt_of(300)
    assert model.session.kv.held == 0
    assert torch.equal(model.session.teacher_forced(tokens), whole.teacher_forced(tokens))
