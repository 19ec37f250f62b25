"""Router, gate and up, and down, launched behind each other as a step does: what lay where the router writes changes no bit."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agentcompile_rules_transformers.testing import experts_case, router_case
from agentcompile_templates_cuda_moe import ExpertsFamily, RouterFamily
from attrs import evolve

from agentcompile_core.plugin_api import DType, Feature, Match, Schedule, StepSource, Target, TemplateFamily, argument_values

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.backend import EmulationBackend

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from moe_cases import H200, drawn

SIZES = {"emulation": (9, 3, 40, 72), "cuda": (32, 8, 768, 2048)}  # experts, slots, rows of gate and of up, their length
LIES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {  # what lies there, by the choice to come and how many experts there are
    "the choice": lambda chosen, count: chosen,
    "the choice in another order": lambda chosen, count: chosen.flip(-1),
    "the choice but for the last slot": lambda chosen, count: torch.cat([chosen[:, :-1], (chosen[:, -1:] + 1) % count], -1),
    "other experts": lambda chosen, count: (chosen + 1) % count,
    "no expert": lambda chosen, count: chosen - (1 << 40),
    "the expert behind the last": lambda chosen, count: torch.full_like(chosen, count),
}
Tensors = dict[str, torch.Tensor]
Run = Callable[[bool], None]


def backend_of(name: str) -> tuple[Any, Target]:
    """A backend and the device that it launches on; the emulated one has few SMs, so that blocks go round their rings."""
    if name == "emulation":
        return EmulationBackend(), evolve(H200, sm_count=4)
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = backend.live_target()
    if target is None or not (target.has(Feature.BULK_COPY) and target.has(Feature.GRIDDEPCONTROL)):
        pytest.skip("there is no GPU with bulk copies and dependent launches")
    return backend, target


class Layer:
    """A router, gate and up, and a sum, on one set of tensors."""

    def __init__(self, name: str, early: bool, late: bool) -> None:
        self.backend, self.target = backend_of(name)
        self.device = "cpu" if name == "emulation" else "cuda"
        self.count, slots, n, k = SIZES[name]
        router = router_case(experts=self.count, slots=slots, normalized=True, dtype=DType.BF16)[0]
        gate = experts_case(sizes=(self.count, slots, n, k), dtype=DType.BF16)[0]
        down = experts_case(sizes=(self.count, slots, k, n), down=True, dtype=DType.BF16)[0]
        self.routed, self.gated, self.summed = ({key: tensor.to(self.device) for key, tensor in drawn(match, 3).items()}
                                                for match in (router, gate, down))
        self.gated["experts"] = self.summed["experts"] = self.routed["experts"]
        self.summed["x"], self.summed["scale"] = self.gated["out"].view(1, slots, n), self.routed["scores"]
        family = ExpertsFamily()
        self.runs = [self._run(RouterFamily(), router, None, self.routed),
                     self._run(family, gate, ("late_dependents", late), self.gated),
                     self._run(family, down, ("early_experts", early), self.summed)]

    def _run(self, family: TemplateFamily, match: Match, order: tuple[str, bool] | None, tensors: Tensors) -> Run:
        points = family.space(match, self.target).points
        point: Schedule = next(p for p in points if order is None or dict(p.items).get(order[0]) == order[1])
        source: StepSource = family.lower(match, point, self.target)
        handle, (launch,) = self.backend.load(self.backend.build(source, self.target)), source.launches
        values = argument_values(launch, {key: tensor.data_ptr() for key, tensor in tensors.items()})
        return lambda pdl: self.backend.prepare_launch(handle, launch, values, pdl)(self.backend.stream())

    def out(self, logits: torch.Tensor, lies: torch.Tensor, pdl: bool) -> torch.Tensor:
        """What a layer makes of logits where ``lies`` lay in the place of the choice; ``pdl``: kernels begin before others have ended."""
        self.routed["logits"].copy_(logits)
        self.routed["experts"].copy_(lies)
        self.summed["out"].fill_(float("nan"))
        if self.device == "cuda":
            torch.cuda._sleep(1_000_000)  # all three are enqueued while it runs
        for number, run in enumerate(self.runs):
            run(pdl and number > 0)
        self.backend.synchronize()
        return self.summed["out"].clone()


@pytest.mark.parametrize("late", [False, True], ids=["dependents at once", "dependents late"])
@pytest.mark.parametrize("backend", ["emulation", pytest.param("cuda", marks=pytest.mark.device)])
def test_what_lies_where_the_router_writes_changes_no_bit(backend: str, late: bool) -> None:
    early, plain = Layer(backend, True, late), Layer(backend, False, False)
    for seed in range(3):
        logits = torch.randn(early.routed["logits"].shape, generator=torch.Generator().manual_seed(seed)).to(early.device)
        want = plain.out(logits, torch.zeros_like(plain.routed["experts"]), False)
        chosen = plain.routed["experts"].clone()
        assert want.isfinite().all() and chosen.unique().numel() == chosen.numel()
        for what, lies in LIES.items():
            for _ in range(2 if backend == "emulation" else 10):
                assert torch.equal(early.out(logits, lies(chosen, early.count), True), want), (what, seed)
