"""A request for tokens: what was asked, what ``generation_config`` adds, and who runs it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve, field, frozen

from ...errors import UsageError
from ...ir.frequencies import near_of
from ...ir.graph import GraphSet
from ..prompts import Prompts, check_length, prompts_of
from .settings import ARGUMENTS, effective, eos_of, ignored, mode_of, new_tokens, of_forward, padding_of, parted, settings, with_eos

if TYPE_CHECKING:
    import torch

Runner = Literal["device", "session", "module prompt", "framework"]
_OVER_THE_STEP = ("greedy_search", "sample", "beam_search", "beam_sample", "assisted_generation")
_WITHOUT_EFFECT = ("tokenizer", "assistant_tokenizer", "trust_remote_code", "synced_gpus")  # where nothing else asks for them
_ONE_BY_ONE = _OVER_THE_STEP[:2]  # of which each token follows from the ones before it
_INSTEAD_OF_TOKENS = ("inputs_embeds", "past_key_values", "cache")
_OURS = (None, "static", "dynamic", "hybrid")  # caches that hold what the session's holds


@frozen(kw_only=True)
class Asked:
    """The arguments of one call of ``generate``; ``options``: those given by any other name."""

    input_ids: Any = None
    max_new_tokens: Any = None
    attention_mask: Any = None
    options: Mapping[str, Any] = field(factory=dict)

    @property
    def named(self) -> "Asked":
        """With ``inputs``, as transformers calls it, as ``input_ids``, and a ``generation_config`` in second place by its name."""
        from transformers import GenerationConfig

        options, ids, count = dict(self.options), self.input_ids, self.max_new_tokens
        inputs = options.pop("inputs", None)
        if inputs is not None:
            if ids is not None:
                raise UsageError("both inputs and input_ids were given; pass one of them")
            ids = inputs
        if isinstance(count, GenerationConfig):
            options, count = {"generation_config": count, **options}, None
        return evolve(self, input_ids=ids, max_new_tokens=count, options=options)


@frozen(kw_only=True)
class Request:
    """One request for at most ``count`` new tokens behind each of ``prompts`` (None: transformers makes them of other arguments).

    ``config`` are all settings that hold, ``eos`` the tokens that end it. ``fields``, ``own`` and ``arguments`` are what the caller gave:
    settings by name, a ``generation_config`` and everything else. ``runs`` says who runs it: the ``device`` alone, choosing the most
    likely token; the ``session`` under transformers' rules, because of ``why`` behind a ``module prompt``, which HuggingFace's own model
    reads; or the ``framework``, because of ``why``. ``notes`` has a sentence for each thing that is ignored.
    """

    prompts: Prompts | None
    count: int
    config: Any
    eos: frozenset[int] = frozenset()
    fields: Mapping[str, Any] = field(factory=dict)
    own: Any = None
    arguments: Mapping[str, Any] = field(factory=dict)
    runs: Runner = "session"
    why: str = ""
    notes: tuple[str, ...] = ()


def request(module: Any, asked: Asked, graphs: GraphSet) -> Request:
    """What one call of ``generate`` means for a captured model.

    Raises:
        UsageError: no such request is possible.
    """
    asked = asked.named
    options = dict(asked.options)
    own = options.pop("generation_config", None)
    fields, arguments = parted(module, with_eos(options))
    config = settings(module, fields, own)
    eos = eos_of(config.eos_token_id)
    if not eos:
        config.eos_token_id = None
    prompts = _prompts(asked, config, eos, arguments, graphs.model.vocab_size)
    length = int(prompts.ids.shape[1] if prompts is not None else arguments["inputs_embeds"].shape[1])
    count = new_tokens(asked.max_new_tokens, config, length, graphs.workload.max_context)
    check_length(length if prompts is None else longest_of(prompts), count, graphs.workload.max_context)
    mode = mode_of(config, arguments.get("assistant_model"))
    greedy = mode == "greedy_search" and not (effective(config) or _effective(arguments))
    why = ((not greedy and _own_loop(module)) or _beyond(module, mode, config, arguments, prompts) or _taken_back(mode, graphs)
           or (length + count > near_of(graphs.frequencies) > 0 and _turned_again(mode, config, arguments, prompts)) or "")
    runs: Runner = "framework" if why else "device" if greedy and prompts is not None and prompts.is_one else "session"
    if not why and (more := of_the_prompt(arguments)):
        runs, why = "module prompt", f"{more[0]} is given"
        if beside := _beside(mode, prompts):
            runs, why = "framework", f"{why} with {beside}"
    arguments |= _shown(asked, prompts)
    return Request(prompts=prompts, count=count, config=config, eos=eos, fields=fields, own=own, arguments=arguments, runs=runs, why=why,
                   notes=ignored(config, fields))


def _prompts(asked: Asked, config: Any, eos: frozenset[int], arguments: Mapping[str, Any], vocabulary: int) -> Prompts | None:
    given = asked.input_ids
    if given is None and "inputs_embeds" in arguments:
        return None
    if given is None:
        if not isinstance(config.bos_token_id, int):
            raise UsageError("input_ids is None, and generation_config names no bos_token_id to begin with; pass a prompt")
        given = [[config.bos_token_id]]
    pad, padding = padding_of(config.pad_token_id, eos)
    found = prompts_of(given, vocabulary, mask=asked.attention_mask, padding=padding)
    if asked.attention_mask is None and found.mask is None and pad is not None and pad not in eos and bool((found.ids == pad).any()):
        # As transformers does where nobody says what is padding.
        return evolve(found, mask=(found.ids != pad).long())
    return found


def _shown(asked: Asked, prompts: Prompts | None) -> dict[str, Any]:
    """The ``attention_mask`` that HuggingFace's own model gets: where one was given, or made of lists of different lengths."""
    if prompts is None or prompts.mask is not None:
        found = asked.attention_mask if prompts is None else prompts.mask
        return {} if found is None else {"attention_mask": found}
    return {} if asked.attention_mask is None else {"attention_mask": prompts.ids.new_ones(prompts.ids.shape)}


def longest_of(prompts: Prompts) -> int:
    """Tokens of the longest prompt, at least 1."""
    return int(prompts.ids.shape[1]) if prompts.mask is None else max(1, int(prompts.mask.sum(1).max()))


def _effective(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of arguments that have an influence on a greedy request."""
    return tuple(name for name, value in arguments.items()
                 if name not in _WITHOUT_EFFECT and not (isinstance(value, list | tuple) and not value))


def _beyond(module: Any, mode: str, config: Any, arguments: Mapping[str, Any], prompts: Prompts | None) -> str:
    """Why a compiled step cannot serve a request: what it asks for is no function of logits of tokens. Empty: it can."""
    for name in ("output_attentions", "output_hidden_states", "use_mtp", "assistant_early_exit", "speculation_type"):
        if getattr(config, name, None) not in (None, False):
            return f"{name}={getattr(config, name)!r}"
    if mode not in _OVER_THE_STEP:
        return mode.replace("_", " ")
    if config.cache_implementation not in _OURS:
        return f"cache_implementation={config.cache_implementation!r}"
    own = arguments.get("custom_generate") is not None
    others = [name for name in arguments if name in _INSTEAD_OF_TOKENS or (own and name in of_forward(module))]
    if others or arguments.get("synced_gpus"):
        return f"{(*others, 'synced_gpus')[0]} is given"
    if prompts is not None and not prompts.is_padded_left:
        return "the prompt holds padding that is not before its tokens"
    return ""


def _beside(mode: str, prompts: Prompts | None) -> str:
    """With what no session goes on behind a prompt that the model itself reads; empty: it may."""
    if mode not in _ONE_BY_ONE:
        return mode.replace("_", " ")
    return "" if prompts is not None and prompts.is_one else "several prompts or padding"


def _turned_again(mode: str, config: Any, arguments: Mapping[str, Any], prompts: Prompts | None) -> str:
    """Why a session cannot serve a request that may grow so long that all of it is turned by other frequencies; empty: it can."""
    from .step_model import StepModel

    alone = mode in _ONE_BY_ONE and prompts is not None and prompts.is_one and config.num_return_sequences in (None, 1)
    others = arguments.get("custom_generate") is not None or of_the_prompt(arguments)
    if alone and prompts is not None and not others and not StepModel.beyond_the_session(prompts.ids, config, prompts.mask):
        return ""
    return "all of a long sequence is turned otherwise, which compiled steps follow for one prompt of tokens alone, and no outputs beside"


def of_the_prompt(arguments: Mapping[str, Any]) -> list[str]:
    """Names of what a prompt is made of beside its tokens: images and sounds, kinds of tokens, positions."""
    free = arguments.get("custom_generate") is not None  # has arguments of its own
    return [] if free else [name for name in arguments if name not in (*ARGUMENTS, "attention_mask")]


def count_tokens(positions: "torch.Tensor", shown: "torch.Tensor") -> bool:
    """Whether ``positions`` count the tokens of a prompt from 0: those that are 1 in ``shown`` [1, n]; padding may have any."""
    return not bool(((positions != shown.cumsum(-1) - 1) & (shown == 1)).any())


def _taken_back(mode: str, graphs: GraphSet) -> str:
    if mode == "assisted_generation" and graphs.states:
        return "assisted generation takes tokens back, and states of fixed size cannot give them"
    return ""


def _own_loop(module: Any) -> str:
    """Why transformers' ``generate`` over our step is not this model's; empty: it is."""
    from transformers import GenerationMixin

    if not hasattr(module, "generate"):
        return ""
    if getattr(type(module), "generate", None) is not GenerationMixin.generate:
        return f"{type(module).__name__} has a generate of its own"
    return ""


def on_device(arguments: Mapping[str, Any], device: "torch.device | str") -> dict[str, Any]:
    """The arguments with tensors on ``device``."""
    import torch

    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
