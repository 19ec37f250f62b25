"""What a model's own forward, or a library that looks on, leaves behind is no change of the model."""

import copy
from typing import Any

import torch
import transformers
from test_generate_manners import CONFIG, PROMPT, QUICK
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import agentcompile_core as ac
from agentcompile_core.runtime.module_changes import AsBound


class Growing(nn.Module):
    """Tables of rotations as of older code: as long as the longest sequence so far."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if not torch.compiler.is_exporting() and int(position_ids.max()) >= len(self.seen):
            self.seen = torch.zeros(int(position_ids.max()) + 1)
        return self.inner(x, position_ids)


def test_what_its_forward_keeps_of_our_own_runs_is_no_change() -> None:
    """A request that transformers' own loop runs for us grows a table; the next one is served as before."""
    torch.manual_seed(1)
    module = transformers.LlamaForCausalLM(copy.deepcopy(CONFIG)).eval().requires_grad_(False)
    module.model.rotary_emb = Growing(module.model.rotary_emb)
    model = ac.compile(module, **QUICK)
    assert model.graphs.graphs, model.notes

    def tokens(**options: Any) -> Any:
        return model.generate(PROMPT, max_new_tokens=3, eos_token_id=None, pad_token_id=7, **options)

    before = tokens()
    for round_ in range(2):
        model.generate(PROMPT.repeat(1, 2 + round_), max_new_tokens=3, pad_token_id=7, output_attentions=True, return_dict_in_generate=True)
        assert len(module.model.rotary_emb.seen) > 4
        assert torch.equal(tokens(), before)


def test_libraries_that_look_on_are_no_change() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    bound = AsBound(module, with_mode=True)
    with FlopCounterMode(display=False):
        assert bound.change() == ""
    assert bound.change() == ""


def test_a_class_method_over_a_method_is_the_same_each_time() -> None:
    class Base(nn.Module):
        def size(self) -> int:
            return 1

    class Part(Base):
        @classmethod
        def size(cls) -> int:  # type: ignore[override]
            return 2

    assert AsBound(Part(), with_mode=True).change() == ""


def test_buffers_that_are_exchanged_again_and_again_are_not_kept() -> None:
    module = nn.BatchNorm1d(4)
    bound = AsBound(module, with_mode=False, forward=lambda part: None)
    for _ in range(20):
        module.running_mean = module.running_mean.clone()
        assert bound.change() == ""
    assert len(bound._stand_ins) == 1
    module.running_mean.add_(1.0)
    assert "running_mean" in bound.change()
