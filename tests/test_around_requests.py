"""What surrounds a request changes no token of it: torch's settings, errors of the caller's own objects, copies of the model."""

import copy
import functools
import pickle
import threading
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_framework_path import t5
from test_generate_manners import CONFIG, PROMPT, QUICK

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.store import Store

NEW = 6
FEW = settings(max_examples=25, derandomize=True, database=None, deadline=None)
REQUESTS: tuple[dict[str, Any], ...] = (
    {}, {"repetition_penalty": 1.3}, {"do_sample": True, "seed": 5}, {"num_beams": 2},
    {"output_hidden_states": True, "return_dict_in_generate": True})


def model() -> Any:
    torch.manual_seed(1)
    made = transformers.LlamaForCausalLM(CONFIG).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.data.mul_(8.0) if parameter.dim() > 1 else None
    return made


@pytest.fixture(scope="module")
def mine() -> Any:
    return ac.compile(model(), **QUICK)


def tokens(mine: Any, options: dict[str, Any], prompt: Any = PROMPT) -> torch.Tensor:
    found = mine.generate(prompt, NEW, eos_token_id=None, **options)
    return found if isinstance(found, torch.Tensor) else found.sequences


@contextmanager
def default_type(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Any:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


AROUND: dict[str, Any] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "a default device": lambda: default_device("meta"),
    "a device": lambda: torch.device("meta"),
    "float64": lambda: default_type(torch.float64), "float16": lambda: default_type(torch.float16),
    "inference": torch.inference_mode, "gradients": torch.enable_grad,
}


def within(names: list[str]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for name in names:
        stack.enter_context(AROUND[name]())
    return stack


@FEW
@given(st.lists(st.sampled_from(sorted(AROUND)), min_size=1, max_size=3, unique=True), st.sampled_from(REQUESTS), st.booleans())
@pytest.mark.filterwarnings("ignore")
def test_settings_of_torch_have_no_say_in_a_request(mine, names: list[str], options: dict[str, Any], listed: bool) -> None:
    wanted = tokens(mine, options)
    with within(names):
        state = torch.is_autocast_enabled("cpu"), torch.get_default_device(), torch.get_default_dtype()
        found = tokens(mine, options, PROMPT.tolist() if listed else PROMPT)
        assert state == (torch.is_autocast_enabled("cpu"), torch.get_default_device(), torch.get_default_dtype())
    assert found.device == wanted.device and torch.equal(found, wanted)


def test_settings_of_torch_have_no_say_in_a_capture(mine) -> None:
    made = model()
    with within(["autocast", "a default device"]):
        found = ac.compile(made, **{**QUICK, "store": Store(None)})
    assert not found.graphs.eager_reason and found.graphs.graphs == mine.graphs.graphs
    assert torch.equal(tokens(found, {}), tokens(mine, {}))


class GoneError(Exception):
    """The client went away."""


class Listener:
    def __init__(self, left: int, error: type[BaseException]) -> None:
        self.left, self.error = left, error

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error("gone")

    def end(self) -> None:
        self.put(torch.zeros(1))


def raising(ids: torch.Tensor, scores: torch.Tensor, *, error: type[BaseException]) -> torch.Tensor:
    raise error("gone")


class Processor(transformers.LogitsProcessor):
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return raising(input_ids, scores, error=self.error)


class Criterion(transformers.StoppingCriteria, Processor):  # type: ignore[misc]
    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return raising(input_ids, scores, error=self.error)


PLACES: dict[str, Any] = {
    "streamer": lambda error: {"streamer": Listener(3, error)},
    "processor": lambda error: {"logits_processor": [Processor(error)]},
    "function": lambda error: {"logits_processor": [functools.partial(raising, error=error)]},
    "criterion": lambda error: {"stopping_criteria": [Criterion(error)]},
    "prefix": lambda error: {"prefix_allowed_tokens_fn": lambda row, ids: raising(ids, ids, error=error)},
}


@FEW
@given(st.sampled_from(sorted(PLACES)), st.sampled_from([GoneError, ValueError, KeyboardInterrupt, RuntimeError, TimeoutError]),
       st.sampled_from([one for one in REQUESTS if "num_beams" not in one]))
@pytest.mark.filterwarnings("ignore")
def test_errors_of_the_callers_own_come_through_and_leave_a_clean_session(mine, place: str, error: type[BaseException],
                                                                          options: dict[str, Any]) -> None:
    wanted = tokens(mine, {})
    with pytest.raises(error, match="gone"):
        tokens(mine, {**options, **PLACES[place](error)})
    assert torch.equal(tokens(mine, {}), wanted)


@pytest.mark.filterwarnings("ignore")
def test_what_transformers_own_objects_say_of_a_request_is_one_sentence(mine) -> None:
    for options in ({"logits_processor": [transformers.SequenceBiasLogitsProcessor([[[5000], 3.0]])]},
                    {"streamer": transformers.TextStreamer(None), "repetition_penalty": 1.2}):
        with pytest.raises(UsageError, match="refused this request"):
            tokens(mine, options, torch.cat([PROMPT, PROMPT]))


@FEW
@given(st.one_of(st.integers(-(1 << 70), 1 << 70), st.sampled_from([-(1 << 63), (1 << 64) - 1, -(1 << 63) - 1, 1 << 64])))
def test_any_seed_is_taken_or_refused_in_a_sentence(mine, seed: int) -> None:
    try:
        torch.Generator().manual_seed(seed)
    except ValueError:
        with pytest.raises(UsageError, match="integer from"):
            mine.generate(PROMPT, 1, do_sample=True, seed=seed)
        return
    assert mine.generate(PROMPT, 1, do_sample=True, seed=seed).shape == (1, 6)


@pytest.mark.parametrize("streamer", [1, "x", object(), Listener])
def test_what_is_no_streamer_gets_one_sentence(mine, streamer: Any) -> None:
    if streamer is Listener:
        streamer = type("Half", (), {"put": print})()
    for options in REQUESTS[:2]:
        with pytest.raises(UsageError, match=r"must have put\(tokens\) and end\(\)"):
            mine.generate(PROMPT, 2, streamer=streamer, **options)


@FEW
@given(st.data(), st.integers(1, 3), st.integers(1, 6))
def test_a_mask_is_of_the_prompts_shape(mine, data, rows: int, width: int) -> None:
    shape = data.draw(st.sampled_from([(width, rows), (rows * width,), (1, rows * width), (rows, width)]))
    ids, mask = torch.full((rows, width), 9), torch.ones(shape, dtype=torch.int64)
    if shape == (rows, width) or (rows == 1 and shape == (width,)):
        assert mine.generate(ids, 1, attention_mask=mask).shape == (rows, width + 1)
        return
    with pytest.raises(UsageError, match="must agree"):
        mine.generate(ids, 1, attention_mask=mask)


def test_a_copy_is_another_name_and_nothing_more_is_possible(mine) -> None:
    twin = copy.copy(mine)
    assert twin.session is mine.session and torch.equal(tokens(twin, {}), tokens(mine, {}))
    for deed in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"cannot be copied or pickled.*save its bundle"):
            deed(mine)
    assert torch.equal(tokens(mine, {}), tokens(twin, {}))


@FEW
@given(st.integers(1, 5), st.booleans(), st.sampled_from(["max_length", "generation_config", "max_new_tokens"]), st.integers(8, 14))
def test_a_decoders_own_prompt_counts_in_its_length(eager, given: int, begun: bool, how: str, length: int) -> None:
    start = torch.tensor([[0, *range(20, 20 + given)][0 if begun else 1:]])
    options = {"generation_config": transformers.GenerationConfig(max_length=length, decoder_start_token_id=0, pad_token_id=0)} if (
        how == "generation_config") else {how: length}
    wanted = eager.loaded.module.generate(PROMPT, decoder_input_ids=start, **copy.deepcopy(options))
    assert torch.equal(eager.generate(PROMPT, decoder_input_ids=start, **options), wanted)


def test_threads_that_compile_one_model_at_the_same_time_all_get_it() -> None:
    """A trace exchanges parts of the model: another thread that traced it then found none of its weights."""
    made, found = model(), []
    threads = [threading.Thread(target=lambda: found.append(ac.compile(made, **QUICK))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    wanted = made.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=4, do_sample=False)
    assert all(torch.equal(one.generate(PROMPT, 4), wanted) for one in found)


@pytest.fixture(scope="module")
def eager() -> Any:
    return ac.compile(t5(), **QUICK)
