"""What ``generation_config`` and the caller say together, as transformers merges them."""

import copy
import difflib
import inspect
import operator
from collections.abc import Collection, Mapping
from typing import Any

from ...errors import UsageError

DEFAULT_NEW_TOKENS = 128
_UNCHANGING = (int, float, str, bytes, type(None))
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
# What has no influence on the tokens of one greedy request that runs in our loop.
_WITHOUT_EFFECT = frozenset({
    "do_sample", "num_beams", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "max_length", "max_new_tokens",
    "transformers_version", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "disable_compile",
    "compile_config", "length_penalty", "early_stopping", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size", "assistant_ensemble_weight",
    "continuous_batching_config", *SAMPLING,
})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,), "min_length": (0,), "min_new_tokens": (0,), "num_return_sequences": (1,),
    "guidance_scale": (1.0,), "diversity_penalty": (0.0,), "num_beam_groups": (1,), "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
}
# What transformers' ``generate`` takes beside the fields of GenerationConfig, and beside what the model's ``forward`` takes.
ARGUMENTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "assistant_model", "negative_prompt_ids",
             "negative_prompt_attention_mask", "custom_generate", "tokenizer", "assistant_tokenizer", "trust_remote_code")
# Values that only forms of the cache, of compilation or of chunking read: the cache and the chunks are the session's.
OF_THE_CACHE = ("cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config", "disable_compile")


def settings(module: Any, options: Mapping[str, Any], given: Any = None) -> Any:
    """The model's ``generation_config`` with ``given``, one for this call, and ``options``, its fields by name, on top.

    Raises:
        UsageError: values that transformers refuses, or ``given`` is none.
    """
    from transformers import GenerationConfig

    known = getattr(module, "generation_config", None)
    known = known if known is not None else GenerationConfig()
    if given is not None and not isinstance(given, GenerationConfig):
        raise UsageError(f"generation_config is a {type(given).__name__}; it must be a GenerationConfig of transformers")
    try:
        config = _copied(known if given is None else given)
        if given is not None:
            config.update(**known.to_dict(), defaults_only=True, allow_custom_entries=True)
        config.update(**options)
    except Exception as exc:
        raise UsageError(f"these generation settings cannot be: {one_line(exc)}") from exc
    return config


def _copied(config: Any) -> Any:
    """A copy that shares nothing which could be changed; nearly all fields are numbers, over which a deep copy takes its time."""
    made = copy.copy(config)
    for name, value in vars(made).items():
        if not isinstance(value, _UNCHANGING):
            vars(made)[name] = copy.deepcopy(value)
    return made


def parted(module: Any, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``options`` in two: fields of GenerationConfig, and other arguments of transformers' ``generate`` that are not None.

    Raises:
        UsageError: a name that is neither, nor an argument of the model's ``forward``.
    """
    from transformers import GenerationConfig

    from .cache_name import CACHE_NAME, CACHE_NAMES

    config = getattr(module, "generation_config", None)
    names = {name for name in vars(config if config is not None else GenerationConfig()) if not name.startswith("_")}
    fields = {name: value for name, value in options.items() if name in names}
    others = {CACHE_NAME if name in CACHE_NAMES else name: value for name, value in options.items() if name not in names}
    unknown = [name for name in others if name not in ARGUMENTS and name not in of_forward(module)]
    if unknown and others.get("custom_generate") is None:  # whose own arguments transformers checks
        _refuse(unknown[0], names)
    return fields, {name: value for name, value in others.items() if value is not None}


def of_forward(module: Any) -> set[str]:
    """Names that a model's ``forward`` takes beside ``input_ids``."""
    if not hasattr(module, "forward"):
        return set()
    return {name for name, one in inspect.signature(module.forward).parameters.items()
            if name != "input_ids" and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}


def _refuse(unknown: str, names: Collection[str]) -> None:
    near = difflib.get_close_matches(unknown, [*sorted(names), *ARGUMENTS, "seed", "streamer", "attention_mask", "generation_config"], 3)
    raise UsageError(f"generate takes no {unknown!r}; " + (f"did you mean {' or '.join(near)}? " if near else "")
                     + "It takes what transformers' generate takes, and seed")


def new_tokens(given: Any, config: Any, length: int, limit: int) -> int:
    """How many tokens are wanted: as given, else as ``generation_config`` says, else 128 or what fits ``limit`` (0: none).

    Raises:
        UsageError: it is no positive integer.
    """
    wanted = given if given is not None else config.max_new_tokens
    if wanted is None and config.max_length is not None:
        longest = _integer("max_length", config.max_length)
        if longest <= length:
            raise UsageError(f"the prompt holds {length} tokens and max_length is {longest}; pass max_new_tokens")
        return longest - length
    if wanted is None:
        return min(DEFAULT_NEW_TOKENS, limit - length) if limit > length else DEFAULT_NEW_TOKENS
    return _integer("max_new_tokens", wanted)


def _integer(name: str, given: Any) -> int:
    """A number of tokens, also as numpy and torch have integers."""
    try:
        found = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        found = 0
    if found < 1:
        raise UsageError(f"{name} is {given!r}; it must be an integer of at least 1")
    return found


def padding_of(given: Any, eos: Collection[int]) -> tuple[int | None, int]:
    """The token that is padding by a ``pad_token_id``, or None; and what goes before prompts that are shorter than others.

    Raises:
        UsageError: it is something else than an integer.
    """
    try:
        found = None if given is None else operator.index(given)
    except TypeError:
        found = 1 << 63
    if isinstance(given, bool) or (found is not None and abs(found) >= 1 << 63):
        raise UsageError(f"pad_token_id is {given!r}; it must be the id of a token, or None")
    return found, found if found is not None and found >= 0 else min(eos, default=0)


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


def ignored(config: Any, options: Mapping[str, Any]) -> tuple[str, ...]:
    """One sentence where the caller gave sampling parameters that greedy decoding does not read."""
    given = [name for name in SAMPLING if options.get(name) is not None]
    if not given or config.do_sample or config.penalty_alpha:
        return ()
    return (f"{', '.join(given)} without do_sample=True: the most likely token is taken, as in transformers; "
            "pass do_sample=True to sample",)


def effective(config: Any) -> tuple[str, ...]:
    """Names of settings that are not neutral for a greedy request: any that is not known to be is none of them."""
    return tuple(sorted(name for name, value in vars(config).items()
                        if name not in _WITHOUT_EFFECT and not name.startswith("_") and not _is_neutral(name, value)))


def _is_neutral(name: str, value: Any) -> bool:
    return value is None or value is False or value in _NEUTRAL.get(name, ())


def check_seed(seed: Any) -> None:
    """Refuse what ``torch.manual_seed`` does not take.

    Raises:
        UsageError: it is no integer, or has more than 64 bits.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 64):
        raise UsageError(f"seed is {seed!r}; it must be an integer from -2^63 to 2^64 - 1")


def check_streamer(streamer: Any) -> None:
    """Refuse what cannot be shown tokens.

    Raises:
        UsageError: it lacks ``put`` or ``end``.
    """
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise UsageError(f"streamer is a {type(streamer).__name__}; it must have put(tokens) and end(), as those of transformers")


def mode_of(config: Any, assistant: Any = None) -> str:
    """transformers' name of the way to search: ``greedy_search``, ``sample``, ``beam_search``, ...

    Raises:
        UsageError: values of another type than transformers compares there.
    """
    filled = copy.copy(config)  # transformers looks once what nobody set is its defaults: with penalty_alpha, top_k of 50 is another way
    for name, value in filled._get_default_generation_params().items():
        if getattr(filled, name, None) is None:
            setattr(filled, name, value)
    try:
        found = filled.get_generation_mode(assistant)
    except Exception as exc:
        raise UsageError(f"these generation settings cannot be: {one_line(exc)}") from exc
    return str(getattr(found, "value", found))


def for_the_session(config: Any, count: int) -> Any:
    """A copy for transformers' preparation of a request for ``count`` new tokens that runs over the session's cache and chunks."""
    found = copy.deepcopy(config)
    for name in OF_THE_CACHE:
        setattr(found, name, None)
    found.max_new_tokens, found.max_length = count, None
    return found


def one_line(exc: BaseException) -> str:
    """What an error says, in one line."""
    text = " ".join(str(exc).split())
    return f"{text} ({type(exc).__name__})" if text else type(exc).__name__
