"""The reference is judged by the framework on a GPU too: its libraries may treat infinities in ways of their own."""

import pytest
import torch
from agentcompile_rules_transformers.testing import norm_case
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.reference import oracle
from agentcompile_core.ops.reference.second_opinion import disagreement
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import Case, DType, InputFamily
from agentcompile_core.worker.operands import graph_values, make_inputs

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@given(norm=st.sampled_from(["rms", "rms_bare", "rms_once", "rms_one_plus", "layer"]),
       rows=st.sampled_from([1, 256, 8192]), columns=st.sampled_from([512, 8192]),
       dtype=st.sampled_from([DType.F32, DType.F16, DType.BF16]),
       family=st.sampled_from(list(InputFamily)), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_of_norms_of_any_size(norm: str, rows: int, columns: int, dtype: DType, family: InputFamily, seed: int) -> None:
    match, graph = norm_case(rows=rows, columns=columns, norm=norm, dtype=dtype)
    values = graph_values(match, graph, make_inputs(match, load_catalog().kind(match.kind), Case(family=family, seed=seed), "cuda"))
    assert disagreement(graph, values, oracle(graph, values)) == ""
