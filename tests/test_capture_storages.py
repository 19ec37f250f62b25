"""Whether tensors share memory is asked in one way, which answers for tensors without numbers too."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from agentcompile_core.stages.capture.known import _may_share
from agentcompile_core.stages.capture.left_behind import ParametersKept
from agentcompile_core.stages.capture.storages import storage_of
from agentcompile_core.stages.capture.unsupported import Unsupported


@pytest.mark.parametrize("kind", ["cpu", "meta", "fake", "empty"])
@pytest.mark.filterwarnings("error")  # the address of a fake tensor is one that torch warns of
def test_views_share_and_others_do_not(kind: str) -> None:
    with FakeTensorMode() if kind == "fake" else torch.device("meta" if kind == "meta" else "cpu"):
        one, other = (torch.zeros(0 if kind == "empty" else 4) for _ in range(2))
        assert storage_of(one) == storage_of(one[1:]) == storage_of(one.detach()) and storage_of(one) is not None
        assert storage_of(one) != storage_of(other) and not _may_share(one, other) and _may_share(one[1:], one)


def test_what_has_no_such_memory_may_share_with_anything() -> None:
    sparse = torch.eye(2).to_sparse()
    assert storage_of(sparse) is None
    assert _may_share(sparse, torch.zeros(2)) and _may_share(torch.zeros(2), sparse) and _may_share([], torch.zeros(2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_are_kept_also_where_they_have_no_numbers(device: str) -> None:
    module, other = nn.Linear(2, 2, device=device).requires_grad_(False), torch.zeros(2, 2, device=device)
    with ParametersKept(module):
        other.add_(module.weight)
        with pytest.raises(Unsupported, match="its own parameters"):
            module.weight[0].mul_(2.0)
