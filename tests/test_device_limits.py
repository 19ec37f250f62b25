"""On a GPU: replays are bit-identical, and tokens are HuggingFace's at every edge of chunks and ranges, up to the last position."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from agentcompile_core.errors import UsageError
from agentcompile_core.ir import ranges
from agentcompile_core.ir.selection import Selection

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"
CONTEXT = 8192
REPLAYS = 1000
NEAR_TIE = 1e-4  # standard deviations of the logits: two tokens so close may change places in fp32

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def compiled(what: Any, dtype: str, budget_s: float) -> Any:
    import agentcompile_core as ac
    from agentcompile_core.configuration import Config
    from agentcompile_core.store import Store

    config = Config(budget_plans=80, budget_s=budget_s, rounds=1, origins=("generated",))
    model = ac.compile(what, dtype=dtype, max_context=CONTEXT, config=config, store=Store(None))
    model.context.close()
    assert model.graphs.kv is not None, model.notes
    return model


def in_ranges(model: Any) -> tuple[Selection, ...]:
    """The selections, and in every later range other schedules of what reads the cache: each of those that was found right, in turn."""
    from agentcompile_core.runtime.sources import source_of

    first, found = [s for s in model.compilation.selections if not s.start], []
    regions = {region.signature: region for region in model.compilation.regions}
    for turn, start in enumerate(ranges.starts(CONTEXT)):
        for selection in first:
            steps = []
            for x in selection.steps:
                others = [r.step for r in model.compilation.records if r.usable and r.signature == selection.signature
                          and r.step.match_id == x.step.match_id and r.step.origin is x.step.origin and r.step != x.step]
                other = others[turn % len(others)] if others and x.step.match_id.startswith("attention") else x.step
                match = regions[selection.signature].match_by_id[other.match_id]
                steps.append(evolve(x, step=other, source=source_of(other, match, model.context.catalog, model.context.target)))
            if steps != list(selection.steps):
                found.append(evolve(selection, start=start, steps=tuple(steps)))
    return (*first, *found)


def with_ranges(model: Any) -> Any:
    """A session of the model over the same weights with a program for every range."""
    from agentcompile_core.installation.building import built
    from agentcompile_core.installation.install import Runnable, install
    from agentcompile_core.pipeline import programs_of

    programs = programs_of(model.graphs, model.compilation.regions, in_ranges(model))
    wanted = {"decode", *(f"decode_from_{start}" for start in ranges.starts(CONTEXT))}
    assert wanted <= programs.keys()
    what = Runnable(graphs=model.graphs, programs=programs, kernels=built(programs, model.compilation.kernels, model.context))
    session, notes = install(model.loaded, what, "cuda", "auto", model.context, model.session._weights)
    assert not [note for note in notes if "on the framework" in note], notes
    assert all(session.step(name).captured for name in wanted)
    return session


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(the tiny model in fp32 with more positions than it was trained on, its session with a program for every range)"""
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = tmp_path_factory.mktemp("models") / "tiny_model"
    shutil.copytree(TINY, folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "max_position_embeddings": CONTEXT}))
    model = compiled(str(folder), "float32", 30.0)
    return model, with_ranges(model)


@pytest.fixture(scope="module")
def wide() -> tuple[Any, Any]:
    """Four layers of Qwen3-1.7B's widths in float16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=32768, hidden_size=2048, intermediate_size=6144, num_hidden_layers=4, num_attention_heads=16,
                         num_key_value_heads=8, head_dim=128, max_position_embeddings=CONTEXT, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = Qwen3ForCausalLM(config).to(torch.float16).eval()
    model = compiled(module, "float16", 30.0)
    return model, with_ranges(model)


def prompt_of(length: int) -> torch.Tensor:
    return torch.randint(2, 2000, (1, length), generator=torch.Generator().manual_seed(length))


def edges() -> list[int]:
    """Positions where another program runs, or another chunk begins."""
    return [2048, *ranges.starts(CONTEXT)]


def agreed(module: Any, whole: torch.Tensor, given: int) -> None:
    """Every token of ``whole`` [1, n] behind the ``given`` first is what HuggingFace's forward over all before it takes for most likely."""
    with torch.inference_mode():
        logits = module(whole.cuda(), use_cache=False).logits[0, given - 1 : -1].float()
    taken = logits.gather(1, whole[0, given:].cuda().unsqueeze(1)).squeeze(1)
    behind = (logits.max(1).values - taken) / logits.std()
    assert float(behind.max()) <= NEAR_TIE, f"token {int(behind.argmax())} is {float(behind.max()):.2e} behind the best"


def differing(session: Any, program: str, position: int, count: int) -> tuple[int, int]:
    """How many of ``count`` replays of a step at ``position`` gave other bits than the first one: of logits, of what it wrote to caches."""
    step, bound, kv = session.step(program), session.bound(program), session.kv
    written = [t.narrow(t.shape.index(CONTEXT), position, 1) for t in (*kv.keys, *kv.values)]
    first: list[torch.Tensor] = []
    of_logits = of_caches = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(count):
        session.ids.fill_(7)
        session.position.fill_(position)
        for row in written:
            row.zero_()
        step()
        now = [bound.output(0), *written]
        first = first or [t.clone() for t in now]
        of_logits = of_logits + (now[0] != first[0]).any()
        of_caches = of_caches + torch.stack([(t != known).any() for t, known in zip(now[1:], first[1:], strict=True)]).any()
    assert bool(first[0].isfinite().all()) and all(bool(row.any()) for row in first[1:]), "a step that wrote nothing is no step"
    return int(of_logits), int(of_caches)


@pytest.mark.parametrize("which", ["tiny", "wide"])
@pytest.mark.parametrize("start", [0, *ranges.starts(CONTEXT)])
def test_a_thousand_replays_are_bit_identical(which: str, start: int, request: pytest.FixtureRequest) -> None:
    """At both ends of each range, over caches that hold a prompt."""
    session = request.getfixturevalue(which)[1]
    end = next((s for s in ranges.starts(CONTEXT) if s > start), CONTEXT)
    with torch.inference_mode():
        session.generate(prompt_of(CONTEXT - 2), 2)
        with session.exclusive():
            program = session.decode_program(start)
            assert session.decode_program(end - 1) == program and program == (f"decode_from_{start}" if start else "decode")
            for position in (start or 192, end - 1):
                assert differing(session, program, position, REPLAYS // 2) == (0, 0), position


def test_generation_over_every_edge_gives_hugging_faces_tokens(tiny: tuple[Any, Any]) -> None:
    model, session = tiny
    for edge in edges():
        for length in (edge - 7, edge - 1, edge, edge + 1):
            found = session.generate(prompt_of(length), 16)
            wanted = model.loaded.module.generate(prompt_of(length).cuda(), max_new_tokens=16, do_sample=False, eos_token_id=None,
                                                  pad_token_id=0, disable_compile=True).cpu()
            if not torch.equal(found.cpu(), wanted):
                agreed(model.loaded.module, found.cpu(), length)


@pytest.mark.parametrize("length", [5, CONTEXT - 60, CONTEXT - 1])
def test_generation_to_the_context_limit_is_hugging_faces(tiny: tuple[Any, Any], length: int) -> None:
    """From a few tokens through all ranges, from just before the end, and of the last token alone; then there is no more."""
    model, session = tiny
    whole = session.generate(prompt_of(length), CONTEXT - length).cpu()
    assert whole.shape == (1, CONTEXT) and torch.equal(whole[:, :length], prompt_of(length))
    agreed(model.loaded.module, whole, length)
    with pytest.raises(UsageError, match=f"exceed the context of {CONTEXT}"):
        session.generate(prompt_of(length), CONTEXT - length + 1)
    assert torch.equal(session.generate(prompt_of(length), CONTEXT - length).cpu(), whole), "a refusal changes nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_grow_over_the_limit_of_their_frequencies(dtype: torch.dtype) -> None:
    """Captured graphs read frequencies where the session writes them; what is read again goes through the same chunks. In half precision
    tokens are those of a session on the framework's operators, or near ties."""
    from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

    import agentcompile_core as ac
    from agentcompile_core.configuration import Config
    from agentcompile_core.store import Store

    limit, positions = 300, 640
    config = Phi3Config(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, max_position_embeddings=positions, original_max_position_embeddings=limit, pad_token_id=0,
                        bos_token_id=1, eos_token_id=2, sliding_window=None,
                        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": limit,
                                         "short_factor": [1.0 + 0.01 * i for i in range(32)],
                                         "long_factor": [1.0 + 0.5 * i for i in range(32)]})
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.device("cuda"):  # a conversion of the whole module would convert its frequencies
        module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    wide = Phi3ForCausalLM(config).cuda().eval()
    wide.load_state_dict({name: value.float() for name, value in module.state_dict().items()}, strict=False)
    model = ac.compile(module, dtype=str(dtype).removeprefix("torch."), config=Config(budget_plans=40, budget_s=20.0, rounds=1),
                       store=Store(None))
    model.context.close()
    assert [f.limit for f in model.graphs.frequencies] == [limit] and model.session._steps["decode"].captured and not model.notes
    near = NEAR_TIE if dtype is torch.float32 else 0.1
    for steps in (1, 4):
        model.session.steps_per_graph = steps
        for length, count in ((290, 40), (limit - 1, 3), (limit, 5), (limit + 1, 5), (20, 20), (500, 100), (5, 600), (8, 9)):
            found = model.generate(prompt_of(length) % 500 + 3, count, eos_token_id=None).cuda()
            every = range(length, length + count) if count <= 40 else (length, limit - 1, limit, limit + 1, length + count - 1)
            for end in (end for end in every if end >= length):
                with torch.inference_mode():
                    logits = wide(found[:, :end], use_cache=False).logits[0, -1]
                behind = float((logits.max() - logits[found[0, end]]) / logits.std())
                assert behind <= near, f"{length} + {count}: token {end} is {behind:.2e} behind the best"
