"""Whether HuggingFace's own model makes of a prompt behind padding what it makes of the prompt alone, as a session does."""

from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..device import at_any_length, release_cache
from .framework_loop import by_framework

if TYPE_CHECKING:
    import torch

    from ..session import Session

_LIKE_OTHERS = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "eos_token_id": None, "return_dict_in_generate": True,
                "output_logits": True, "output_attentions": False, "output_hidden_states": False, "cache_implementation": None,
                "disable_compile": True}


def told_by_padding(module: Any, session: "Session", ids: "torch.Tensor", mask: "torch.Tensor | None") -> str:
    """Why padded prompts [rows, n] are not a session's, in one clause; empty: they are, or none of these is padded.

    Models with positions of their own or states may count padding in: seen at the first padded prompt of a session, where the model
    itself reads the one with the most padding with and without it, and makes two tokens as transformers' own loop would.
    """
    if mask is None or bool((mask == 1).all()):
        return ""
    if session.padding is None:
        row = int(mask.sum(1).argmin())
        session.padding = _differs(module, session, ids[row : row + 1], mask[row : row + 1])
    return session.padding or ""


def _differs(module: Any, session: "Session", ids: "torch.Tensor", mask: "torch.Tensor") -> str | None:
    """One clause on how they differ, empty where they do not; None: they could not be compared, and the next prompt is."""
    import torch

    from ...ops.agreement import beyond, program_bound

    alone = ids[:, mask[0] == 1]
    try:
        padded, bare = (_logits(module, session, one, shown) for one, shown in ((ids, mask), (alone, mask[:, mask[0] == 1])))
    except (UsageError, torch.OutOfMemoryError):  # transformers makes nothing of one of them, or has no room beside the session
        release_cache()
        return None
    bound = program_bound(session.bound("decode").graph)
    for behind_padding, by_itself in zip(padded, bare, strict=False):
        if why := beyond(behind_padding[0], by_itself[0], bound, "the same prompt without padding"):
            return f"what the model makes of a prompt depends on the padding before it: {why}"
        if int(behind_padding.argmax()) != int(by_itself.argmax()):
            break  # equally likely within rounding: the next ones are of other tokens
    return ""


def _logits(module: Any, session: "Session", ids: "torch.Tensor", mask: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
    """Logits [1, vocabulary] of two steps."""
    given = {**_LIKE_OTHERS, "pad_token_id": 0, "attention_mask": mask.to(session.device)}
    with at_any_length(session.backend), session.module_runs():
        found: tuple[torch.Tensor, ...] = by_framework(module, ids.to(session.device), 2, given, seed=None, streamer=None).logits
    return found
