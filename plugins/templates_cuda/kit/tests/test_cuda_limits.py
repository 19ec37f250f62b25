"""Launches that no CUDA device takes are refused, whatever their target."""

import pytest
from agentcompile_cuda_kit import check_launches

from agentcompile_core.plugin_api import ContractError, Launch, StepSource


def source(**changes: object) -> StepSource:
    launch = Launch(**{"entry": "k_0", "grid": (4, 1, 1), "block": (128, 1, 1), "arguments": (), **changes})
    return StepSource(digest="0", code="", launches=(launch,))


@pytest.mark.parametrize("changes", [{}, {"block": (1024, 1, 1)}, {"grid": (2**31 - 1, 65535, 65535)}, {"cluster": 4}])
def test_what_fits_is_taken(changes: dict) -> None:
    check_launches(source(**changes))


@pytest.mark.parametrize(("changes", "message"), [
    ({"block": (2048, 1, 1)}, "1024 threads"), ({"block": (32, 32, 2)}, "1024 threads"), ({"block": (1, 1, 65)}, "at most"),
    ({"grid": (1, 70000, 1)}, "grid"), ({"cluster": 16, "grid": (16, 1, 1)}, "cluster of 16"),
])
def test_what_does_not_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_launches(source(**changes))
