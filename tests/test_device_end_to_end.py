"""On a GPU: the tiny model in fp32, compiled there, gives HuggingFace's tokens through generated kernels and graph replay."""

from pathlib import Path

import pytest
import torch

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"
PROMPTS = ("When an exception", "The following", "If the")

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def compiled():  # type: ignore[no-untyped-def]
    import agentcompile_core as ac
    from agentcompile_core.configuration import Config
    from agentcompile_core.store import Store

    config = Config(budget_plans=60, budget_s=60.0, rounds=1, origins=("generated",))
    model = ac.compile(str(TINY), dtype="float32", config=config, store=Store(None))
    model.context.close()
    return model


def hugging_face(compiled, ids: torch.Tensor, count: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
    torch.backends.cuda.matmul.allow_tf32 = False
    found = compiled.loaded.module.generate(ids.cuda(), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None,
                                            pad_token_id=0, disable_compile=True)
    return found.cpu()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_equal_hugging_face(compiled, prompt: str) -> None:  # type: ignore[no-untyped-def]
    ids = compiled.tokenizer(prompt, return_tensors="pt").input_ids
    assert torch.equal(compiled.generate(ids, 200, eos_token_id=None), hugging_face(compiled, ids, 200))


def test_every_step_of_decode_is_a_generated_kernel_in_a_captured_graph(compiled) -> None:  # type: ignore[no-untyped-def]
    from agentcompile_core.report.accounting import accounting

    found = accounting(compiled.compilation.programs["decode"])
    assert found["framework_operators"] == {} and set(found["bytes"]) == {"generated"}
    assert compiled.session._steps["decode"].captured and compiled.notes == ()


def test_repeats_are_bit_identical_and_sessions_recover_from_long_prompts(compiled) -> None:  # type: ignore[no-untyped-def]
    long = torch.arange(2, 700).remainder(2000).view(1, -1)
    first = compiled.session.teacher_forced(long[:, :64])
    compiled.generate(long, 32, eos_token_id=None)
    assert torch.equal(first, compiled.session.teacher_forced(long[:, :64]))


def test_a_streamer_and_an_end_token_see_the_same_tokens(compiled) -> None:  # type: ignore[no-untyped-def]
    class Collect:
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    ids = compiled.tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    plain = compiled.generate(ids, 64, eos_token_id=None)
    streamer = Collect()
    assert torch.equal(compiled.generate(ids, 64, eos_token_id=None, streamer=streamer), plain)
    assert streamer.ended and streamer.tokens == plain[0].tolist()
    stop = int(plain[0, ids.shape[1] + 20])
    stopped = compiled.generate(ids, 64, eos_token_id=stop)
    assert int(stopped[0, -1]) == stop and torch.equal(stopped, plain[:, :stopped.shape[1]])


def test_steps_beyond_the_end_of_a_request_disturb_no_other_one(compiled) -> None:  # type: ignore[no-untyped-def]
    """The next one begins at once, on the same stream or another, while they still run."""
    ids = [compiled.tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    wanted = [compiled.generate(one, 24, eos_token_id=None) for one in ids]
    other = torch.cuda.Stream()
    for turn in range(30):
        one, whole = ids[turn % 3], wanted[turn % 3]
        end = one.shape[1] + turn % 20
        stop = int(whole[0, end])
        with torch.cuda.stream(other if turn % 4 == 3 else torch.cuda.current_stream()):
            found = compiled.generate(one, 24, eos_token_id=stop)
        assert torch.equal(found, whole[:, : found.shape[1]]) and int(found[0, -1]) == stop
        with torch.cuda.stream(other if turn % 2 else torch.cuda.current_stream()):
            assert torch.equal(compiled.generate(ids[(turn + 1) % 3], 24, eos_token_id=None), wanted[(turn + 1) % 3])


SEARCHES = [
    {"num_beams": 3, "num_return_sequences": 2}, {}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}, {"guidance_scale": 1.4},
    {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9}, {"do_sample": True, "min_p": 0.05, "num_return_sequences": 2},
    {"stop_strings": [".", "tion"]}, {"return_dict_in_generate": True, "output_scores": True},
]


@pytest.mark.parametrize("several", [False, True], ids=["one", "rows"])
@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_every_search_gives_hugging_faces_tokens(compiled, search, several: bool) -> None:  # type: ignore[no-untyped-def]
    """Rows and beams change places in the session's cache between replays of captured graphs."""
    torch.backends.cuda.matmul.allow_tf32 = False
    text = list(PROMPTS) if several else PROMPTS[0]
    encoded = compiled.tokenizer(text, return_tensors="pt", padding=True, padding_side="left").to("cuda")
    options = {"max_new_tokens": 32, "eos_token_id": None, "pad_token_id": 0, "tokenizer": compiled.tokenizer, **search}
    found = []
    for model, own in ((compiled.loaded.module, {"disable_compile": True}), (compiled, {})):
        torch.manual_seed(5)
        found.append(model.generate(**encoded, **options, **own))
    theirs, mine = (one if isinstance(one, torch.Tensor) else one.sequences for one in found)
    assert mine.device == theirs.device and torch.equal(mine, theirs)
