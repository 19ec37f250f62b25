"""What a validator is given of a trial: a ``TrialRun`` of its own, so that nothing that it changes reaches another validator."""

from attrs import evolve
from torch import Tensor

from ..ir.verdict import Case
from ..ops.reference import Bounded
from ..plugin.interfaces import Backend
from .execution import Execution, Result


class GivenRun:
    """One validator's view of an execution. References are copies; the first run of each case makes its inputs anew.

    The reference of a case is shared by all candidates, so it is made of inputs that nobody changed, or for this validator alone.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self.backend: Backend = execution.backend
        execution.forget_runs()

    def run(self, case: Case, poison: float) -> Result:
        """As ``Execution.run``."""
        return self._execution.run(case, poison)

    def inputs(self, case: Case, device: str) -> dict[str, Tensor]:
        """As ``Execution.inputs``."""
        return self._execution.inputs(case, device)

    def expected(self, case: Case, inputs: dict[str, Tensor]) -> dict[str, Bounded]:
        """As ``Execution.expected``, in tensors that nobody else reads.

        Raises:
            Disagreement: as there.
        """
        run = self._execution
        found = run.expected(case, inputs) if run.may_share(case, inputs) else run.apart(case, inputs)
        return {name: _copied(bound) for name, bound in found.items()}

    def values(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """As ``Execution.values``."""
        return self._execution.values(outputs)


def _copied(bound: Bounded) -> Bounded:
    """Without ``before`` and ``rest``, which lie in the inputs that were given."""
    choices = None if bound.choices is None else _clone(bound.choices)
    return evolve(bound, value=_clone(bound.value), error=_clone(bound.error), choices=choices)


def _clone(tensor: Tensor) -> Tensor:
    """A copy that repeats what ``tensor`` repeats: an error that is the same everywhere stays a single number."""
    repeats = (stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor[tuple(slice(0, 1) if once else slice(None) for once in repeats)].clone().expand(tensor.shape)
