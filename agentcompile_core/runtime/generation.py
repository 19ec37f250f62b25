"""A request for tokens, with HuggingFace's meaning: what was given, what ``generation_config`` says, and which loop can do it."""

import copy
import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ..errors import UsageError
from .device import forked_rng
from .sampling import Pick, seeded

if TYPE_CHECKING:
    import torch

DEFAULT_NEW_TOKENS = 128
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
# What has no influence on the tokens of one greedy request that runs in our loop.
_WITHOUT_EFFECT = frozenset({
    "do_sample", "num_beams", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "max_length", "max_new_tokens",
    "transformers_version", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "disable_compile",
    "compile_config", "length_penalty", "early_stopping", "low_memory", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
    "max_matching_ngram_size", "assistant_ensemble_weight", "speculation_type", "continuous_batching_config",
    "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", *SAMPLING,
})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,), "min_length": (0,), "min_new_tokens": (0,), "num_return_sequences": (1,),
    "guidance_scale": (1.0,), "diversity_penalty": (0.0,), "num_beam_groups": (1,), "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,), "cache_implementation": ("static", "dynamic", "hybrid"),
}
# What HuggingFace's own loop does and ours does not.
_HANDED_OVER = ("num_return_sequences", "guidance_scale", "watermarking_config", "stop_strings", "token_healing", "use_mtp",
                "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
                "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "cache_implementation")


@frozen(kw_only=True)
class Request:
    """One request: ``prompt`` int64 [1, n] on the CPU, at most ``count`` new tokens, and the settings that hold for it.

    ``options`` is what the caller gave by name, ``eos`` the tokens that end it, ``plain`` whether it is the arg max and nothing else,
    ``handed_over`` why HuggingFace's own loop runs it (empty: ours does), ``notes`` one sentence for each thing that is ignored.
    """

    prompt: "torch.Tensor"
    count: int
    options: Mapping[str, Any]
    eos: frozenset[int] = frozenset()
    plain: bool = True
    handed_over: str = ""
    notes: tuple[str, ...] = ()


def prompt_of(given: Any, vocabulary: int = 0) -> "torch.Tensor":
    """Token ids as int64 [1, n] on the CPU, from a tensor or lists of integers; one dimension is one prompt.

    Raises:
        UsageError: it is text, is no integers, is empty, holds several prompts or ids outside of the vocabulary.
    """
    import torch

    _refuse_text(given)
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        raise UsageError(f"input_ids is a {type(given).__name__} that is no prompt; expected integers of shape [1, n]") from exc
    if ids.dim() == 1:
        ids = ids.unsqueeze(0)
    if ids.numel() == 0:
        raise UsageError(f"a prompt of 0 tokens (input_ids of shape {tuple(ids.shape)}); it must hold at least 1")
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        more = "; one prompt at a time: call generate once for each" if ids.dim() == 2 and ids.shape[0] > 1 else ""
        raise UsageError(f"input_ids of shape {tuple(ids.shape)} and type {ids.dtype}; "
                         f"expected one prompt as integers of shape [1, n]{more}")
    ids = ids.detach().to("cpu", torch.int64, copy=True)
    if vocabulary and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise UsageError(f"token ids from {int(ids.min())} to {int(ids.max())}; the model's vocabulary is 0 to {vocabulary - 1}")
    return ids


def _refuse_text(given: Any) -> None:
    if isinstance(given, str | bytes) or (isinstance(given, list | tuple) and any(isinstance(item, str | bytes) for item in given)):
        raise UsageError("text was given to generate, which takes token ids; tokenize it first: "
                         "model.generate(model.tokenizer(text, return_tensors='pt').input_ids)")
    if isinstance(given, Mapping) or hasattr(given, "input_ids"):
        raise UsageError("what a tokenizer returns was given as input_ids; pass its parts by name: model.generate(**encoding)")


def check_length(length: int, new: int, limit: int) -> None:
    """Refuse what does not fit a context of ``limit`` positions.

    Raises:
        UsageError: nothing is wanted, or the prompt and the new tokens are too many.
    """
    if new < 1:
        raise UsageError(f"a prompt of {length} tokens and {new} new tokens; both must be at least 1")
    if length + new > limit:
        raise UsageError(f"{length} prompt tokens + {new} new tokens exceed the context of {limit}; "
                         f"shorten the prompt or compile with a context of at least {length + new}")


def check_mask(mask: Any, prompt: "torch.Tensor") -> None:
    """Accept an attention mask of ones, of the prompt's shape.

    Raises:
        UsageError: it hides tokens, or has another shape.
    """
    import torch

    if mask is None:
        return
    found = torch.as_tensor(mask)
    if found.numel() != prompt.numel():
        raise UsageError(f"an attention_mask of shape {tuple(found.shape)} for a prompt of shape {tuple(prompt.shape)}; they must agree")
    if not bool((found == 1).all()):
        hidden = int((found != 1).sum())
        raise UsageError(f"the attention_mask hides {hidden} of {prompt.numel()} tokens; one prompt needs no padding: "
                         "leave the padding out, or tokenize with padding=False")


def settings(module: Any, options: Mapping[str, Any]) -> Any:
    """The model's ``generation_config`` with what the caller gave by name on top, as transformers merges them.

    Raises:
        UsageError: an unknown name, or values that transformers refuses.
    """
    from transformers import GenerationConfig

    known = getattr(module, "generation_config", None)
    config = copy.deepcopy(known) if known is not None else GenerationConfig()
    unknown = [name for name in options if not hasattr(config, name)]
    if unknown:
        names = sorted(name for name in vars(config) if not name.startswith("_"))
        near = difflib.get_close_matches(unknown[0], [*names, "seed", "streamer", "attention_mask"], 3)
        raise UsageError(f"generate takes no {unknown[0]!r}; " + (f"did you mean {' or '.join(near)}? " if near else "")
                         + "It takes what transformers' GenerationConfig holds, and attention_mask, streamer and seed")
    try:
        config.update(**options)
    except Exception as exc:
        raise UsageError(f"these generation settings cannot be: {one_line(exc)}") from exc
    return config


def new_tokens(given: Any, config: Any, length: int, limit: int) -> int:
    """How many tokens are wanted: as given, else as ``generation_config`` says, else 128 or what fits ``limit`` (0: none).

    Raises:
        UsageError: it is no positive integer.
    """
    wanted = given if given is not None else config.max_new_tokens
    if wanted is None and config.max_length is not None:
        wanted = config.max_length - length
        if wanted < 1:
            raise UsageError(f"the prompt holds {length} tokens and max_length is {config.max_length}; pass max_new_tokens")
    if wanted is None:
        wanted = min(DEFAULT_NEW_TOKENS, limit - length) if limit > length else DEFAULT_NEW_TOKENS
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise UsageError(f"max_new_tokens is {wanted!r}; it must be an integer of at least 1")
    return wanted


def eos_of(given: Any) -> frozenset[int]:
    """The tokens that end a request, from an ``eos_token_id``; none where it is None, empty or negative.

    Raises:
        UsageError: it is something else than integers.
    """
    found = given.tolist() if hasattr(given, "tolist") else given
    items = list(found) if isinstance(found, list | tuple | set | frozenset) else [] if found is None else [found]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise UsageError(f"eos_token_id is {given!r}; it must be an integer, several of them, or None to never stop")
    return frozenset(item for item in items if item >= 0)


def with_eos(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with every way to say "never stop" (None, an empty list, -1) as transformers' None."""
    if "eos_token_id" not in options:
        return dict(options)
    return {**options, "eos_token_id": sorted(eos_of(options["eos_token_id"])) or None}


def request(module: Any, prompt: "torch.Tensor", max_new_tokens: Any, mask: Any, given: Mapping[str, Any], limit: int = 0) -> Request:
    """What one call of ``generate`` means for a captured model.

    Raises:
        UsageError: as the parts above.
    """
    check_mask(mask, prompt)
    options = with_eos(given)
    config = settings(module, options)
    if mask is not None:
        options["attention_mask"] = prompt.new_ones(prompt.shape)
    eos = eos_of(config.eos_token_id)
    count = new_tokens(max_new_tokens, config, prompt.shape[1], limit)
    plain = not config.do_sample and not _effective(config)
    return Request(prompt=prompt, count=count, options=options, eos=eos, plain=plain, notes=ignored(config, options),
                   handed_over=_handed_over(config) or ("" if mask is not None else _padded(config, prompt, eos)))


def ignored(config: Any, options: Mapping[str, Any]) -> tuple[str, ...]:
    """One sentence where the caller gave sampling parameters that greedy decoding does not read."""
    given = [name for name in SAMPLING if options.get(name) is not None]
    if not given or config.do_sample:
        return ()
    return (f"{', '.join(given)} without do_sample=True: the most likely token is taken, as in transformers; "
            "pass do_sample=True to sample",)


def _effective(config: Any) -> tuple[str, ...]:
    """Names of settings that are not neutral for a greedy request."""
    changed = config.to_diff_dict()
    return tuple(sorted(name for name, value in changed.items()
                        if name not in _WITHOUT_EFFECT and not name.startswith("_") and not _neutral(name, value)))


def _neutral(name: str, value: Any) -> bool:
    return value is None or value is False or value in _NEUTRAL.get(name, ())


def _handed_over(config: Any) -> str:
    mode = str(getattr(config.get_generation_mode(), "value", config.get_generation_mode()))
    if mode not in ("greedy_search", "sample"):
        return mode.replace("_", " ")
    found = [name for name in _HANDED_OVER if not _neutral(name, getattr(config, name, None))]
    return f"{found[0]}={getattr(config, found[0])!r}" if found else ""


def _padded(config: Any, prompt: "torch.Tensor", eos: frozenset[int]) -> str:
    """transformers hides padding tokens of a prompt where it gets no attention_mask."""
    pad = config.pad_token_id
    if isinstance(pad, int) and pad not in eos and bool((prompt == pad).any()):
        return f"the prompt holds the padding token {pad} and no attention_mask says that it is meant"
    return ""


def by_framework(module: Any, inputs: "torch.Tensor", count: int, keywords: Mapping[str, Any], *, seed: int | None, streamer: Any) -> Any:
    """HuggingFace's own ``generate``; a tensor comes back on the CPU, anything else as it is.

    Raises:
        UsageError: transformers refused or failed; the message says what it said.
    """
    import torch

    keywords = {k: v.to(inputs.device) if isinstance(v, torch.Tensor) else v for k, v in keywords.items() if k != "max_length"}
    try:
        with forked_rng([inputs.device], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            found = module.generate(inputs, max_new_tokens=count, streamer=streamer, **keywords)
    except (UsageError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as exc:  # transformers raises of every kind
        raise UsageError(f"{type(module).__name__}.generate of transformers refused this request: {one_line(exc)}") from exc
    return found.cpu() if isinstance(found, torch.Tensor) else found


def by_session(module: Any, session: Any, wanted: Request, *, seed: int | None, streamer: Any) -> "torch.Tensor":
    """Our loop: the arg max alone, or with the processors and stopping criteria that transformers makes for the request.

    Raises:
        UsageError: transformers refuses the settings, or the session the request.
    """
    if wanted.plain:
        return session.generate(wanted.prompt, wanted.count, eos_token_id=sorted(wanted.eos), streamer=streamer)
    if not hasattr(module, "generate"):
        raise UsageError(f"{type(module).__name__} has no generate of transformers, so only the most likely token can be taken")

    def loop(model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **_: Any) -> Any:
        pick = Pick(processors=logits_processor, stops=stopping_criteria, do_sample=bool(generation_config.do_sample),
                    generator=seeded(seed, session.device))
        return session.picked(wanted.prompt, wanted.count, pick, streamer)

    # transformers prepares the request and calls our loop instead of its own; the cache is the session's.
    keywords = {**wanted.options, "use_cache": False, "custom_generate": loop}
    return by_framework(module, wanted.prompt.to(session.device), wanted.count, keywords, seed=None, streamer=None)


def one_line(exc: BaseException) -> str:
    """What an error says, in one line."""
    text = " ".join(str(exc).split())
    return f"{text} ({type(exc).__name__})" if text else type(exc).__name__
