"""Router, gate and up, and down, launched behind each other as a step does: what lay where the choice is written changes no bit."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agentcompile_rules_transformers.testing import experts_case, routed_experts_case, router_case
from agentcompile_templates_cuda_moe import ExpertsFamily, RouterFamily
from attrs import evolve

from agentcompile_core.plugin_api import DType, Feature, Match, Target, TemplateFamily, argument_values

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
    """A router, gate and up, and a sum, on one set of tensors; or gate and up that have their router in them (``routed``), and a sum."""

    def __init__(self, name: str, *, routed: bool, early: bool, late: bool) -> None:
        self.backend, self.target = backend_of(name)
        self.device = "cpu" if name == "emulation" else "cuda"
        self.count, slots, n, k = SIZES[name]
        said: dict[str, Any] = {"sizes": (self.count, slots, n, k), "dtype": DType.BF16}
        gate = routed_experts_case(**said)[0] if routed else experts_case(**said)[0]
        down = experts_case(sizes=(self.count, slots, k, n), down=True, wide=routed, dtype=DType.BF16)[0]
        gated, summed = self._drawn(gate), self._drawn(down)
        self.runs: list[Run] = []
        self.kept: list[Tensors] = []
        if routed:
            self.logits, self.experts, scores = gated["logits"], gated["choice"], gated["scores"]
        else:
            router = router_case(experts=self.count, slots=slots, normalized=True, dtype=DType.BF16)[0]
            given = self._drawn(router)
            self.logits, self.experts, scores = given["logits"], given["experts"], given["scores"]
            self._launch(RouterFamily(), router, {}, given)
            gated["experts"] = self.experts
        summed |= {"x": gated["out"], "experts": self.experts, "scale": scores}
        self.result = summed["out"]
        self._launch(ExpertsFamily(), gate, {"late_dependents": late}, gated)
        self._launch(ExpertsFamily(), down, {"early_experts": early}, summed)

    def _drawn(self, match: Match) -> Tensors:
        return {name: tensor.to(self.device) for name, tensor in drawn(match, 3).items()}

    def _launch(self, family: TemplateFamily, match: Match, order: dict[str, bool], tensors: Tensors) -> None:
        """The first schedule in an order."""
        points = family.space(match, self.target).points
        source = family.lower(match, next(p for p in points if order.items() <= dict(p.items).items()), self.target)
        handle, (launch,) = self.backend.load(self.backend.build(source, self.target)), source.launches
        values = argument_values(launch, {name: tensor.data_ptr() for name, tensor in tensors.items()})
        self.kept.append(tensors)  # who launches keeps no tensor alive
        self.runs.append(lambda pdl: self.backend.prepare_launch(handle, launch, values, pdl)(self.backend.stream()))

    def out(self, logits: torch.Tensor, lies: torch.Tensor, pdl: bool) -> torch.Tensor:
        """What a layer makes of logits where ``lies`` lay in the place of the choice; ``pdl``: kernels begin before others have ended."""
        self.logits.copy_(logits)
        self.experts.copy_(lies)
        self.result.fill_(float("nan"))
        if self.device == "cuda":
            torch.cuda._sleep(1_000_000)  # all are enqueued while it runs
        for number, run in enumerate(self.runs):
            run(pdl and number > 0)
        self.backend.synchronize()
        return self.result.clone()


@pytest.mark.parametrize("late", [False, True], ids=["dependents at once", "dependents late"])
@pytest.mark.parametrize("routed", [False, True], ids=["router alone", "router within"])
@pytest.mark.parametrize("backend", ["emulation", pytest.param("cuda", marks=pytest.mark.device)])
def test_what_lies_where_the_choice_is_written_changes_no_bit(backend: str, routed: bool, late: bool) -> None:
    early, plain = Layer(backend, routed=routed, early=True, late=late), Layer(backend, routed=routed, early=False, late=False)
    for seed in range(3):
        logits = torch.randn(early.logits.shape, generator=torch.Generator().manual_seed(seed)).to(early.device)
        want = plain.out(logits, torch.zeros_like(plain.experts), False)
        chosen = plain.experts.clone()
        assert want.isfinite().all() and chosen.unique().numel() == chosen.numel()
        for what, lies in LIES.items():
            for _ in range(2 if backend == "emulation" else 10):
                assert torch.equal(early.out(logits, lies(chosen, early.count), True), want), (what, seed)
