"""Programs of the core run on the emulation backend."""

import subprocess

import attrs
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_validator_emulation.backend import EmulationBackend, build_source
from agentcompile_validator_emulation.engine import Mode
from agentcompile_validator_emulation.module import CONSTRUCTOR_GUARD, _symbols
from agentcompile_validator_emulation.validator import EmulationValidator

from agentcompile_core.plugin_api import (
    DType,
    Graph,
    GraphKind,
    Node,
    Origin,
    Program,
    Ref,
    Schedule,
    Segment,
    Step,
    TensorSpec,
    Value,
    ValueKind,
    i32,
)
from agentcompile_core.runtime.binder import bind
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.weights import WeightStore

TRIAL = EmulationValidator().controls(EmulationBackend())[0][0]


def source_for(count: int):
    """The good control's source over ``count`` elements: the same text and digest, another grid and another scalar."""
    launch = TRIAL.source.launches[0]
    arguments = (*launch.arguments[:2], i32("count", count))
    return attrs.evolve(TRIAL.source, launches=(attrs.evolve(launch, grid=(-(-count // 128), 1, 1), arguments=arguments),))


def match_for(name: str, count: int):
    """The control's match at a node called ``name``."""
    spec = TensorSpec(shape=(count,), dtype=DType.F32)
    operands = tuple(attrs.evolve(operand, spec=spec) for operand in TRIAL.match.operands)
    return attrs.evolve(TRIAL.match, nodes=(name,), operands=operands)


def test_two_steps_that_share_a_binary_run_over_their_own_shapes():
    """Shapes are arguments, so both steps have one digest; each must still get its own grid and values."""
    counts, values, nodes, segments = (1000, 300), [], [], []
    sources = {count: source_for(count) for count in counts}
    for i, count in enumerate(counts):
        spec = TensorSpec(shape=(count,), dtype=DType.F32)
        values += [Value(name=f"in{i}", spec=spec, kind=ValueKind.INPUT), Value(name=f"out{i}", spec=spec)]
        nodes.append(Node(name=f"mul{i}", op="aten.mul.Tensor", kind="mul", args=(Ref(f"in{i}"), 2.0), outputs=(f"out{i}",)))
        match = match_for(f"mul{i}", count)
        step = Step(match_id=match.id, implementation="test/twice", origin=Origin.GENERATED, schedule=Schedule(()))
        segments.append(Segment(nodes=(f"mul{i}",), step=step, match=match, source=sources[count].key,
                                operands=(("in0", (f"in{i}",)), ("out", (f"out{i}",)))))
    graph = Graph(name="two", kind=GraphKind.FORWARD, values=tuple(values), nodes=tuple(nodes), inputs=("in0", "in1"),
                  outputs=("out0", "out1"))
    program = Program(graph=graph, segments=tuple(segments), sources=tuple(sources.values())).verify()
    backend = EmulationBackend()
    assert sources[1000].digest == sources[300].digest
    kernel = backend.build(sources[1000], preset("h200"))
    inputs = {f"in{i}": torch.randn(count) for i, count in enumerate(counts)}
    bound = bind(program, WeightStore(torch.nn.Module(), "cpu"), {}, inputs,
                 Executables(device="cpu", backend=backend, kernels={kernel.digest: kernel}))
    bound.run()
    for i in range(2):
        torch.testing.assert_close(bound.output(i), 2 * inputs[f"in{i}"], rtol=0, atol=0)


def test_names_of_a_library_are_those_that_nm_says() -> None:
    library = build_source(TRIAL.source, Mode.CHECKED)
    said = subprocess.run(["nm", "--defined-only", str(library)], capture_output=True, text=True, check=True).stdout
    wanted = {name: int(place, 16) for place, kind, name in map(str.split, said.splitlines()) if kind != "a"}  # files of which it was made
    found = _symbols(library.read_bytes())
    assert {name: found[name] for name in wanted} == wanted
    assert "emu_launch" in wanted and any(name.startswith(CONSTRUCTOR_GUARD) for name in wanted)
