"""Prompts as they are given: tensors, lists, several of different lengths, with and without an attention mask."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ..errors import UsageError

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class Prompts:
    """``ids`` int64 [rows, n] and ``mask`` int64 [rows, n] on the CPU: 1 for a token, 0 for padding; None: all are tokens.

    ``is_ragged``: given as lists of different lengths, so that nobody but us knows of padding.
    """

    ids: "torch.Tensor"
    mask: "torch.Tensor | None" = None
    is_ragged: bool = False

    @property
    def is_one(self) -> bool:
        """Whether it is one prompt without padding."""
        return self.mask is None and self.ids.shape[0] == 1

    @property
    def is_padded_left(self) -> bool:
        """Whether all padding is before the tokens."""
        if self.mask is None:
            return True
        return bool((self.mask[:, -1] == 1).all() and (self.mask[:, 1:] >= self.mask[:, :-1]).all())


def prompt_of(given: Any, vocabulary: int = 0) -> "torch.Tensor":
    """Token ids of one prompt as int64 [1, n] on the CPU, from a tensor or lists of integers; one dimension is one prompt.

    Raises:
        UsageError: as ``prompts_of``, or they are several.
    """
    ids = prompts_of(given, vocabulary).ids
    if ids.shape[0] != 1:
        raise UsageError(f"input_ids of shape {tuple(ids.shape)}; a session takes one prompt at a time, as integers of shape [1, n]")
    return ids


def prompts_of(given: Any, vocabulary: int = 0, *, mask: Any = None, padding: int = 0) -> Prompts:
    """Token ids of one prompt or several, from a tensor or lists of integers; one dimension is one prompt.

    Args:
        vocabulary: ids are below it; 0: it is not known.
        mask: as tokenizers return it, of the same shape or lists of the same lengths.
        padding: what goes before the prompts that are shorter than the longest one.

    Raises:
        UsageError: it is text, is no integers, is empty, holds ids outside of the vocabulary, or the mask is none of this prompt.
    """

    _refuse_text(given)
    ragged = _ragged(given)
    if ragged:
        lengths = [len(row) for row in given]
        ids, hidden = _left(given, padding), _left([[1] * length for length in lengths], 0)
        if mask is not None:
            shown = [len(row) for row in mask] if isinstance(mask, list | tuple) else f"the type {type(mask).__name__}"
            if shown != lengths:
                raise UsageError(f"an attention_mask of {shown} for prompts of {lengths} tokens; they must agree")
            hidden = _left(mask, 0)
        mask = hidden
    else:
        ids = _ids(given)
    if vocabulary and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise UsageError(f"token ids from {int(ids.min())} to {int(ids.max())}; the model's vocabulary is 0 to {vocabulary - 1}")
    return Prompts(ids=ids, mask=None if mask is None else _mask(mask, ids), is_ragged=ragged)


def _ids(given: Any) -> "torch.Tensor":
    import torch

    if isinstance(given, list | tuple) and given and all(isinstance(row, torch.Tensor) and row.dim() == 1 for row in given):
        given = torch.stack(tuple(given))
    ids = _dense(given, "input_ids", "no prompt; expected integers of shape [1, n]")
    if ids.dim() == 1:
        ids = ids.unsqueeze(0)
    if ids.numel() == 0:
        raise UsageError(f"a prompt of 0 tokens (input_ids of shape {tuple(ids.shape)}); it must hold at least 1")
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise UsageError(f"input_ids of shape {tuple(ids.shape)} and type {ids.dtype}; "
                         "expected prompts as integers of shape [rows, n], one prompt as [1, n]")
    return ids.detach().to("cpu", torch.int64, copy=True)


def _dense(given: Any, name: str, what_not: str) -> "torch.Tensor":
    """Values that can be read, as a tensor; ``what_not`` is said of those that cannot."""
    import torch

    try:
        found = given if isinstance(given, torch.Tensor) else torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        raise UsageError(f"{name} is a {type(given).__name__} that is {what_not}") from exc
    if found.is_nested or found.layout is not torch.strided or found.is_meta or found.is_quantized:
        kind = f"of type {found.dtype}, layout {found.layout} and device {found.device.type}"
        raise UsageError(f"{name} is a tensor {kind} that is {what_not}")
    return found


def _mask(given: Any, ids: "torch.Tensor") -> "torch.Tensor | None":
    """int64 [rows, n], or None where nothing is hidden."""
    import torch

    mask = _dense(given, "attention_mask", "no mask; expected 1 for each token and 0 for padding, in the prompt's shape")
    if mask.shape not in (ids.shape, ids.shape[1:] if len(ids) == 1 else ids.shape):
        raise UsageError(f"an attention_mask of shape {tuple(mask.shape)} for a prompt of shape {tuple(ids.shape)}; they must agree")
    values = mask.detach().reshape(ids.shape).to("cpu", torch.float64)
    shown = (values != 0).to(torch.int64)
    if not bool((shown == values).all()):
        raise UsageError("the attention_mask holds other values than 1 for a token and 0 for padding")
    if not bool(shown.any(1).all()):
        raise UsageError("the attention_mask hides all tokens of a prompt; leave at least 1")
    return None if bool(shown.all()) else shown


def _ragged(given: Any) -> bool:
    """Whether it is several prompts of different lengths, none of them empty."""
    if not isinstance(given, list | tuple) or not all(isinstance(row, list | tuple) or hasattr(row, "tolist") for row in given):
        return False
    lengths = {len(row) for row in given if getattr(row, "ndim", 1) == 1}
    return len(lengths) > 1 and 0 not in lengths


def _left(rows: Any, padding: int) -> "torch.Tensor":
    """Rows of different lengths as int64 [rows, n], padded before each one."""
    import torch

    found = [_ids(row)[0] for row in rows]
    longest = max(len(row) for row in found)
    return torch.stack([torch.cat([row.new_full((longest - len(row),), padding), row]) for row in found])


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
