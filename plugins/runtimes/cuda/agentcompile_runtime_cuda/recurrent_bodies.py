"""Bodies of the operators that recurrences of a prompt are made of, each compared with the framework on first use; None: not served."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from .compared import CLOSE_RECURRENCES, Compared
from .recurrent_rows import RecurrentRows
from .scan_chunks import ScanChunks
from .short_convolution import ShortConvolution

if TYPE_CHECKING:
    import torch

    from agentcompile_core.plugin_api import RecurrenceCall


class RecurrentBodies:
    """``recurrence`` and ``convolution`` as ``agentcompile.recurrence`` and ``agentcompile.causal_convolution`` say."""

    def __init__(self, recurrences: tuple[ScanChunks, RecurrentRows], convolution: ShortConvolution, compared: Compared) -> None:
        """``recurrences``: in the order in which they are asked."""
        self._recurrences, self._convolution, self._compared = recurrences, convolution, compared

    def recurrence(self, *operands: Any, **how: Any) -> "tuple[torch.Tensor, torch.Tensor] | None":
        """y and the last state."""
        import torch

        from agentcompile_core.plugin_api import RecurrenceCall

        given = RecurrenceCall(*operands, **how)
        for recurrent, call, key in self._ways(given):
            made = call.decay.new_empty(call.x.shape), call.new_state()
            agreed = self._compared.agreed(key, partial(recurrent, call, made), lambda made=made: made,
                                           lambda: torch.ops.agentcompile.recurrence.default(*operands, **how), CLOSE_RECURRENCES)
            if agreed:
                return made
        return None

    def recurrence_in_place(self, state: "torch.Tensor | None", *operands: Any, into: "torch.Tensor | None" = None,
                            **how: Any) -> "torch.Tensor | None":
        """y of one token, in ``into`` where that is given, and the last state in place of the first.

        A kind of call is compared once, beside the state; behind that, each thread reads its part of the state before it writes it.
        """
        from agentcompile_core.plugin_api import RecurrenceCall

        given = RecurrenceCall(state, *operands, **how)
        if state is None or given.x.shape[1] != 1:
            return None
        way = next(((*one, self._compared.served.get(one[2])) for one in self._ways(given)), None)
        if way is None or not way[3]:
            return None
        recurrent, call = way[:2]
        y = call.decay.new_empty(call.x.shape) if into is None else into
        recurrent(call, (y, state))
        return y

    def _ways(self, given: "RecurrenceCall") -> "Iterator[tuple[ScanChunks | RecurrentRows, RecurrenceCall, tuple[Any, ...]]]":
        """Who serves a call, as they read it, and by what it is compared once."""
        for recurrent in self._recurrences:
            laid = recurrent.laid(given)
            if laid is not None:
                call, kind = laid
                yield recurrent, call, (type(recurrent).__name__, kind, call.x.shape[2], call.x.dtype, call.state is None,
                                        call.valid is None, call.skip is None)

    def convolution(self, state: "torch.Tensor", x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None" = None,
                    valid: "torch.Tensor | None" = None, silu: bool = False) -> "tuple[torch.Tensor, torch.Tensor] | None":
        """The columns and the last of them."""
        import torch

        if not self._convolution.takes(state, x, weight, bias):
            return None
        made = torch.empty((1, x.shape[2], x.shape[1]), dtype=x.dtype, device=x.device), torch.empty_like(state)
        results = made[0].transpose(1, 2), made[1]
        key = self._key(x, weight, bias, valid, silu)
        agreed = self._compared.agreed(key, lambda: self._convolution(state, x, weight, bias, valid, silu, made), lambda: results,
                                       lambda: torch.ops.agentcompile.causal_convolution.default(state, x, weight, bias, valid, silu))
        return results if agreed else None

    def convolution_in_place(self, state: "torch.Tensor", x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None" = None,
                             valid: "torch.Tensor | None" = None, silu: bool = False, *,
                             into: "torch.Tensor | None" = None) -> "torch.Tensor | None":
        """The column of one token, in ``into`` where that is given, and the last columns in place of the first; compared beside them."""
        import torch

        served = self._compared.served.get(self._key(x, weight, bias, valid, silu))
        if not served or x.shape[2] != 1 or not self._convolution.takes(state, x, weight, bias):
            return None
        made = torch.empty((1, x.shape[1], 1), dtype=x.dtype, device=x.device) if into is None else into
        self._convolution(state, x, weight, bias, valid, silu, (made, state))
        return made

    @staticmethod
    def _key(x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None", valid: "torch.Tensor | None",
             silu: bool) -> tuple[Any, ...]:
        return "causal_convolution", x.dtype, weight.shape[1], bias is None, valid is None, silu
