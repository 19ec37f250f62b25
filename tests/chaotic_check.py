"""A check that takes the first result it compares for further apart than roundings of a usual model leave it, as a chaotic model's is."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from agentcompile_core.installation import program_check


@contextmanager
def chaotic() -> Iterator[None]:
    """What follows is compared as it is."""
    right, first = program_check._beyond, [True]

    def beyond(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> str:
        said = f"{program_check.BY_ROUNDING} is 0.4 where the framework's rms is 0.9" if first else right(found, wanted, bound)
        first.clear()
        return said

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(program_check, "_beyond", beyond)
        yield
