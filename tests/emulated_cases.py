"""What a family makes of a match, emulated in every case that a candidate is tried on."""

import torch
from agentcompile_validator_emulation.testing import Emulated

from agentcompile_core.ops.dtypes import torch_dtype
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.reference import oracle
from agentcompile_core.plugin_api import Graph, Match, MatchKind, Target, TemplateFamily, compare
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.worker.operands import graph_values, make_inputs


def within_its_budget(
    family: TemplateFamily, kind: MatchKind, match: Match, graph: Graph, target: Target, *, point: int, seed: int
) -> None:
    """Assert it of what the framework computes of ``graph`` and of what the kernel does at one ``point`` of the space.

    ``graph``: what ``match`` covers. A result that the kernel leaves unwritten is NaN.
    """
    assert family.accepts(match, target) is True
    kernel = Emulated(family.lower(match, family.space(match, target).points[point], target), match, target)
    outputs = [operand for operand in match.operands if operand.access.value != "read"]
    for case in cases_for(match, kind, f"seed {seed}", emulated=True):
        tensors = make_inputs(match, kind, case, "cpu")
        values = graph_values(match, graph, tensors)
        expected = oracle(graph, values)
        honest = compile_nodes(graph, device="cpu").run({name: tensor.clone() for name, tensor in values.items()})
        tensors |= {operand.name: torch.full(operand.spec.shape, torch.nan, dtype=torch_dtype(operand.spec.dtype)) for operand in outputs}
        kernel.run(tensors)
        for written in outputs:
            (name,) = written.values
            for made in (honest[name], tensors[written.name].reshape(honest[name].shape)):
                verdict = compare(made, expected[name])
                assert verdict.ok, (case.family, name, verdict)
