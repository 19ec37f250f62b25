"""Running a request for tokens: by the device alone, by the session under transformers' rules, or by HuggingFace's own model."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ...errors import UsageError
from ..device import at_any_length
from ..imported import without_offset
from .framework_loop import by_framework, drawing, of_request, refusing
from .module_prompt import Unlike, as_tokens, behind_prompt, by_module_prompt
from .padded import told_by_padding
from .request import Request, count_tokens, longest_of, on_device
from .settings import for_the_session, mode_of

if TYPE_CHECKING:
    import torch

    from ..session import Session


def serve(module: Any, session: "Session", wanted: Request, *, seed: int | None, streamer: Any, say: Callable[[str], None]) -> Any:
    """What transformers' ``generate`` returns for the request; tensors on the session's device, or the CPU.

    ``say`` gets one line where a loop of transformers runs, and why.

    Raises:
        UsageError: transformers refuses the request, or the session is busy.
    """
    if wanted.runs == "device":
        assert wanted.prompts is not None
        return session.generate(wanted.prompts.ids, wanted.count, eos_token_id=sorted(wanted.eos), streamer=streamer)
    if not hasattr(module, "generate"):
        raise UsageError(f"{type(module).__name__} has no generate of transformers; only the most likely tokens of one prompt can be taken")
    with session.exclusive():
        if wanted.runs == "module prompt":
            wanted = as_tokens(module, session, wanted) or wanted
        if wanted.runs == "session" and (why := _of_padding(module, session, wanted)):
            wanted = evolve(wanted, runs="framework", why=why)
        if wanted.runs == "session":
            return by_session(module, session, wanted, seed=seed, streamer=streamer, say=say)
        if wanted.runs == "module prompt":
            return by_module_prompt(module, session, wanted, seed=seed, streamer=streamer, say=say)
        say(f"transformers' own loop runs this request, without kernels: {wanted.why}")
        inputs = None if wanted.prompts is None else wanted.prompts.ids.to(session.device)
        with at_any_length(session.backend), session.module_runs():
            return by_framework(module, inputs, wanted.count, of_request(wanted), seed=seed, streamer=streamer)


def _of_padding(module: Any, session: "Session", wanted: Request) -> str:
    prompts = wanted.prompts
    return "" if prompts is None or prompts.is_ragged else told_by_padding(module, session, prompts.ids, prompts.mask)


def by_session(module: Any, session: "Session", wanted: Request, *, seed: int | None, streamer: Any, say: Callable[[str], None]) -> Any:
    """transformers' ``generate`` over the session, which somebody holds exclusively."""
    from .step_model import StepModel

    assert wanted.prompts is not None
    session.ready(longest_of(wanted.prompts), wanted.count)  # of transformers' loops a session sees one step at a time
    config = for_the_session(wanted.config, wanted.count)
    ids, mask = wanted.prompts.ids, wanted.prompts.mask
    arguments = {**wanted.arguments, "attention_mask": ids.new_ones(ids.shape) if mask is None else mask}
    with drawing(seed, session.device), refusing(module, streamer, *arguments.values()):
        model = StepModel(module, session, config, say)
        found = model.generate(ids.to(session.device), generation_config=config, streamer=streamer, **on_device(arguments, session.device))
    return _without_cache(found) if isinstance(found, dict) else found


def _without_cache(found: Any) -> Any:
    """A ModelOutput less its cache, which is the session's and is overwritten by the next request."""
    from .cache_name import CACHE_NAME

    return type(found)(**{name: value for name, value in found.items() if name != CACHE_NAME})


def custom_loop(session: "Session", say: Callable[[str], None]) -> Callable[..., Any]:
    """For ``custom_generate`` of HuggingFace's own model: transformers prepares the request there, and the session makes the tokens."""

    def loop(model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **others: Any) -> Any:
        from .cache_name import CACHE_NAME
        from .step_model import StepModel

        mode, past = mode_of(generation_config), others.pop(CACHE_NAME, None)
        if mode not in ("greedy_search", "sample"):
            raise UsageError(f"custom_generate serves greedy search and sampling, and this request is {mode.replace('_', ' ')}; "
                             "call generate of the compiled model")
        if past is not None and past.get_seq_length():
            raise UsageError(f"{CACHE_NAME} holds {past.get_seq_length()} tokens; the session keeps its own cache: leave it out")
        with session.exclusive():
            ids = input_ids.to(session.device)
            if why := told_by_padding(model, session, ids, others.get("attention_mask")):
                raise UsageError(f"custom_generate cannot serve this prompt: {why}; call generate of the compiled model")
            try:
                step = (behind_prompt(model, session, ids, generation_config, {CACHE_NAME: past, **others}, say)
                        if _holds_more(ids, others) else StepModel(model, session, generation_config, say))
                found = step.run(ids, logits_processor, stopping_criteria, others.get("attention_mask"), others.get("streamer"))
            except Unlike as unlike:
                raise UsageError(f"custom_generate cannot serve this prompt: {unlike}; call generate of the compiled model") from unlike
            finally:
                without_offset(session)
            return _without_cache(found) if isinstance(found, dict) else found.to(input_ids.device)

    return loop


def _holds_more(ids: "torch.Tensor", given: Mapping[str, Any]) -> bool:
    """Whether a prompt that transformers has prepared is more than tokens: other tensors, or positions that do not count them.

    Also where these say nothing: that such tensors say nothing is known only once a prompt was compared (``as_tokens``).
    """
    import torch

    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if any(isinstance(one, torch.Tensor | list | tuple) for name, one in given.items() if name not in ("attention_mask", "position_ids")):
        return True
    if positions is None:
        return False
    return not count_tokens(positions, torch.ones_like(ids) if mask is None else mask)
