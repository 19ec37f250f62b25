"""The tokens that processors and criteria of a request are shown, into which some write."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Shown:
    """``ids`` [1, n] is what was shown last, as transformers returns it: behind the last token, to the criteria. None: nobody was asked."""

    def __init__(self) -> None:
        self.ids: torch.Tensor | None = None

    def to(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        """``ask(ids, scores)``, such that what it is shown, and writes there, is remembered."""

        def asked(ids: "torch.Tensor", scores: "torch.Tensor | None") -> Any:
            self.ids = ids
            return ask(ids, scores)

        return asked
