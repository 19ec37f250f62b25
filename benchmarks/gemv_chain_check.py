"""The linear layers of one decode step as one captured chain of gemv kernels under programmatic dependent launch.

Checks every phase against torch, then times the chain with the first schedule of each space, and with --sweep improves
one phase after the other inside the chain (isolated timings over-promise). All layers have weights of their own, so
nothing is read from L2 that a real step would read from memory. Attention is left out: O reads the QKV result.

    python benchmarks/gemv_chain_check.py --model qwen3-1.7b --sweep 40
    python benchmarks/gemv_chain_check.py --model qwen3-1.7b --beside 8    # each phase by FMA, by tensor cores, with dealt rows
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_templates_cuda_gemv import GemvFamily
from agentcompile_templates_cuda_gemv.gemv import TICKETS
from attrs import frozen

from agentcompile_core.ir.candidate import StepSource
from agentcompile_core.ir.expression import Expression, Operation, PointwiseKind
from agentcompile_core.ir.graph import DType, TensorSpec
from agentcompile_core.ir.kind_names import LINEAR
from agentcompile_core.ir.plan import Schedule
from agentcompile_core.ir.region import Access, Match, Operand, Role, SemanticLabel
from agentcompile_core.ir.target import Target

READ_CEILING_GBPS = 4457.0  # H200, measured; only the ratio that is printed depends on it
EPS = 1e-6


@frozen(kw_only=True)
class Model:
    """Sizes of a decoder."""

    hidden: int
    query: int
    key_value: int
    inner: int
    layers: int
    vocabulary: int


MODELS = {
    "qwen3-1.7b": Model(hidden=2048, query=2048, key_value=1024, inner=6144, layers=28, vocabulary=151936),
    "qwen3-4b": Model(hidden=2560, query=4096, key_value=1024, inner=9728, layers=36, vocabulary=151936),
    "llama-3.2-1b": Model(hidden=2048, query=2048, key_value=512, inner=8192, layers=16, vocabulary=128256),
    "llama-3.2-3b": Model(hidden=3072, query=3072, key_value=1024, inner=8192, layers=28, vocabulary=128256),
}
RESIDUAL = Expression(arguments=("acc0", "aux0"), operations=(Operation(PointwiseKind.ADD, ("acc0", "aux0")),))
GATE = Expression(arguments=("acc0", "acc1"), operations=(
    Operation(PointwiseKind.SILU, ("acc0",)), Operation(PointwiseKind.MUL, (0, "acc1"))))


def linear(n: int, k: int, *, norm: bool = False, pair: int = 1, residual: bool = False) -> Match:
    """One fused linear phase in fp16."""
    def operand(name: str, role: Role, shape: tuple[int, ...], access: Access = Access.READ) -> Operand:
        return Operand(name=name, role=role, access=access, values=(name,), spec=TensorSpec(shape=shape, dtype=DType.F16))

    operands = [operand("x", Role.INPUT, (k,)), operand("weight", Role.WEIGHT, (pair * n, k))]
    operands += [operand("norm_weight", Role.WEIGHT, (k,))] * norm + [operand("aux0", Role.INPUT, (n,))] * residual
    operands.append(operand("out", Role.OUTPUT, (n,), Access.WRITE))
    return Match(kind=LINEAR, label=SemanticLabel.GEMV, nodes=("linear",), operands=tuple(operands),
                 epilogue=GATE if pair == 2 else RESIDUAL if residual else None,
                 attributes=(("n", n), ("k", k), ("pair", pair), ("norm", "rms" if norm else "none"), ("norm_eps", EPS)))


def phases(model: Model) -> dict[str, Match]:
    """The five linear phases of a step."""
    return {
        "qkv": linear(model.query + 2 * model.key_value, model.hidden, norm=True),
        "o": linear(model.hidden, model.query, residual=True),
        "gate_up": linear(model.inner, model.hidden, norm=True, pair=2),
        "down": linear(model.hidden, model.inner, residual=True),
        "head": linear(model.vocabulary, model.hidden, norm=True),
    }


class Chain:
    """Weights, buffers and prepared launches of one model."""

    def __init__(self, model: Model, backend: CudaBackend, target: Target) -> None:
        self.model, self.backend, self.target = model, backend, target
        self.matches, self.family = phases(model), GemvFamily()
        self.steps = [(name, layer) for layer in range(model.layers) for name in ("qkv", "o", "gate_up", "down")] + [("head", 0)]
        self.weights = {step: self._random(self.matches[step[0]].need("weight").spec.shape) for step in self.steps}
        self.norm = torch.rand(model.hidden, device="cuda").add_(0.5).half()
        size = max(model.vocabulary, 2 * model.inner)
        self.buffers = {name: torch.zeros(size, device="cuda", dtype=torch.half) for name in ("hidden", "qkv", "middle", "act", "logits")}
        self.start = torch.randn(model.hidden, device="cuda").half()
        self.tickets = torch.zeros(1, device="cuda", dtype=torch.int32)
        self.bytes = sum(weight.nbytes for weight in self.weights.values())
        self._built: dict[tuple[str, Schedule], tuple[StepSource, object]] = {}

    def _random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.half).mul_(shape[1] ** -0.5)

    def operands(self, step: tuple[str, int]) -> dict[str, torch.Tensor]:
        """The tensors of one step; residual streams alternate between two buffers."""
        x, aux, out = {"qkv": ("hidden", "", "qkv"), "o": ("qkv", "hidden", "middle"), "gate_up": ("middle", "", "act"),
                       "down": ("act", "middle", "hidden"), "head": ("hidden", "", "logits")}[step[0]]
        found = {"x": self.buffers[x], "weight": self.weights[step], "norm_weight": self.norm, "out": self.buffers[out],
                 TICKETS: self.tickets}
        return {**found, "aux0": self.buffers[aux]} if aux else found

    def build(self, name: str, schedule: Schedule) -> tuple[StepSource, object]:
        """Lower, compile and load one schedule of one phase."""
        if (name, schedule) not in self._built:
            source = self.family.lower(self.matches[name], schedule, self.target)
            self._built[name, schedule] = source, self.backend.load(self.backend.build(source, self.target))
        return self._built[name, schedule]

    def prepare(self, step: tuple[str, int], schedule: Schedule, pdl: bool) -> Callable[[int], None]:
        """One launch of the chain."""
        source, handle = self.build(step[0], schedule)
        tensors, launch = self.operands(step), source.launches[0]
        values = [tensors[a.operand].data_ptr() if a.operand else a.value for a in launch.arguments]
        return self.backend.prepare_launch(handle, launch, values, pdl)

    def check(self, schedules: dict[str, Schedule]) -> dict[str, float]:
        """Largest error of each phase relative to the largest result, against torch in fp32."""
        errors = {}
        self.buffers["hidden"][: self.model.hidden] = self.start
        for step in [("qkv", 0), ("o", 0), ("gate_up", 0), ("down", 0), ("head", 0)]:
            match, tensors = self.matches[step[0]], self.operands(step)
            x, n = tensors["x"][: match.integer("k")].float(), match.integer("n")
            if match.operand("norm_weight"):
                x = ((x * torch.rsqrt(x.square().mean() + EPS)).half() * self.norm).float()
            sums = (tensors["weight"].float() @ x).view(-1, n)
            expected = torch.nn.functional.silu(sums[0]) * sums[1] if match.integer("pair") == 2 else sums[0]
            expected = expected + tensors["aux0"][:n].float() if "aux0" in tensors else expected
            tensors["out"].fill_(float("nan"))
            self.prepare(step, schedules[step[0]], pdl=False)(torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()
            errors[step[0]] = float((tensors["out"][:n].float() - expected).abs().max() / expected.abs().max())
        return errors

    def time_ms(self, schedules: dict[str, Schedule], pdl: bool = True, repetitions: int = 15) -> float:
        """Median milliseconds of the captured chain; the first kernel has no programmatic edge."""
        self.buffers["hidden"][: self.model.hidden] = self.start
        runs = [self.prepare(step, schedules[step[0]], pdl and index > 0) for index, step in enumerate(self.steps)]

        def run(stream: int) -> None:
            for launch in runs:
                launch(stream)

        times = self.backend.time(run, repetitions=repetitions, runs_per_repetition=1)
        if not isinstance(times, tuple):
            raise SystemExit(times.reason)
        return sorted(times)[len(times) // 2] / 1e3


def sweep(chain: Chain, best: dict[str, Schedule], points: int, rounds: int) -> dict[str, Schedule]:
    """Improve one phase at a time inside the chain; prints one JSON line per improvement."""
    record = chain.time_ms(best)
    for _ in range(rounds):
        for name, match in chain.matches.items():
            for rank, schedule in enumerate(chain.family.space(match, chain.target).points[:points]):
                found = chain.time_ms({**best, name: schedule}, repetitions=7)
                if found < record and chain.time_ms({**best, name: schedule}) < record:
                    record, best = found, {**best, name: schedule}
                    emit(phase=name, rank=rank, ms=round(record, 4), schedule=str(schedule))
    return best


def beside(chain: Chain, best: dict[str, Schedule], points: int) -> None:
    """Of each phase the first ring schedules in the chain, by FMA and by tensor cores; dealt rows are among them. A JSON line each."""
    for name, match in chain.matches.items():
        rings = [point for point in chain.family.space(match, chain.target).points if point["path"] == "ring"][:points]
        for ring in rings:
            tensor = Schedule({**dict(ring.items), "path": "tensor"})
            error = chain.check({**best, name: tensor})[name]
            fma_ms, tensor_ms = (chain.time_ms({**best, name: schedule}) for schedule in (ring, tensor))
            emit(phase=name, fma_ms=round(fma_ms, 4), tensor_ms=round(tensor_ms, 4), relative_error=error, schedule=str(ring))


def emit(**facts: object) -> None:
    """One JSON line."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Parse the command line, check, time, sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-1.7b")
    parser.add_argument("--sweep", type=int, default=0, metavar="POINTS", help="schedules of each phase to try in the chain")
    parser.add_argument("--rounds", type=int, default=1, help="sweeps over all phases")
    parser.add_argument("--beside", type=int, default=0, metavar="POINTS",
                        help="ring schedules of each phase to time by FMA and by tensor cores")
    options = parser.parse_args()
    backend = CudaBackend()
    target = backend.live_target()
    if target is None:
        raise SystemExit("no CUDA device that a preset describes; run this on a GPU machine")
    chain = Chain(MODELS[options.model], backend, target)
    first = {name: chain.family.space(match, target).points[0] for name, match in chain.matches.items()}
    direct = {name: next(p for p in chain.family.space(match, target).points if p["path"] == "direct")
              for name, match in chain.matches.items()}
    floor = chain.bytes / READ_CEILING_GBPS / 1e6
    emit(model=options.model, gigabytes=round(chain.bytes / 1e9, 3), floor_ms=round(floor, 4))
    for label, schedules in (("first choices", first), ("first direct choices", direct)):
        emit(label=label, relative_error=chain.check(schedules))
        for pdl in (True, False):
            ms = chain.time_ms(schedules, pdl)
            emit(label=label, pdl=pdl, ms=round(ms, 4), over_floor=round(ms / floor, 3))
    if options.beside:
        beside(chain, first, options.beside)
    if options.sweep:
        began = time.monotonic()
        best = sweep(chain, first, options.sweep, options.rounds)
        ms = chain.time_ms(best, repetitions=31)
        emit(label="swept", ms=round(ms, 4), over_floor=round(ms / floor, 3), seconds=round(time.monotonic() - began),
             relative_error=chain.check(best), schedules={name: str(schedule) for name, schedule in best.items()})


if __name__ == "__main__":
    main()
