"""For the tests of the conformance kits: a kit over an offer with a planted defect."""

import itertools
from typing import Any

import pytest


def refused(base: type, test: str, reason: str, **attributes: Any) -> None:
    """``test`` refuses the planted defect for ``reason``, and no test of the kit before it finds anything else."""
    kit = type("Kit", (base,), attributes)()
    tests = (name for name in vars(base.__mro__[1]) if name.startswith("test_"))
    for earlier in itertools.takewhile(lambda name: name != test, tests):
        getattr(kit, earlier)()
    with pytest.raises(AssertionError, match=f"(?s){reason}"):
        getattr(kit, test)()
