"""Every family that the project ships passes the kit that it asks third parties to pass."""

import pytest
from agentcompile_rules_transformers.testing import (
    argmax_case,
    attention_case,
    elementwise_case,
    gated_case,
    gather_case,
    linear_case,
    masked_attention_case,
    norm_case,
    rope_case,
    rope_table_case,
)

from agentcompile_core.ir.graph import DType
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.interfaces import TemplateFamily
from agentcompile_core.testing.conformance import TemplateFamilyConformance

LOOKUP, NORM = gather_case(columns=8, vocabulary=9), norm_case(columns=8)
INSTALLED = load_catalog(strict=False).template_families


class Shipped(TemplateFamilyConformance):
    """Two schedules of each case."""

    qualified = ""
    samples = 2

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        if self.qualified not in INSTALLED:
            pytest.skip(f"{self.qualified} is not installed")

    @property
    def family(self) -> TemplateFamily:
        return INSTALLED[self.qualified]


class TestGemv(Shipped):
    qualified, rejected = "gemv/gemv", (NORM,)
    cases = (linear_case(n=48, k=256, norm="rms", bias=True, residual=True), linear_case(n=(32, 16, 16), k=128),
             gated_case(n=40, k=128, norm="rms"))


class TestNorm(Shipped):
    qualified, rejected = "norm/norm", (LOOKUP,)
    cases = (norm_case(columns=520, residual=True), norm_case(columns=64, rows=3, norm="layer", dtype=DType.F32))


class TestElementwise(Shipped):
    qualified, rejected = "elementwise/elementwise", (LOOKUP,)
    cases = (elementwise_case(columns=130, operators=("silu", "mul", "add"), dtype=DType.BF16),)


class TestGather(Shipped):
    qualified, rejected = "elementwise/gather", (NORM,)
    cases = (gather_case(columns=520, vocabulary=20, rows=2), gather_case(columns=7, vocabulary=9, dtype=DType.F32))


class TestRope(Shipped):
    qualified, rejected = "rope/rope", (LOOKUP,)
    cases = (rope_case(heads=4, head_dim=32), rope_case(heads=2, head_dim=32, rotary_dim=16))


class TestRopeTable(Shipped):
    qualified, rejected = "rope/rope_table", (LOOKUP,)
    cases = (rope_table_case(half=32),)


class TestArgmax(Shipped):
    qualified, rejected = "argmax/argmax", (LOOKUP,)
    cases = (argmax_case(n=1003), argmax_case(n=1003, advance=True))


class TestAttention(Shipped):
    qualified, rejected = "attention/attention", (LOOKUP,)
    cases = (attention_case(heads=(4, 2), head_dim=64, capacity=128, rope="rms"),
             attention_case(heads=(2, 2), head_dim=32, capacity=64, window=16, dtype=DType.F32))


class TestMaskedAttention(Shipped):
    qualified, rejected, samples = "attention/masked_attention", (NORM, masked_attention_case(sizes=(1, 1, 1, 2, 2, 264))), 1
    cases = (masked_attention_case(sizes=(2, 4, 2, 5, 37, 24), mask=(2, 1, 1, 37)),)


def test_no_shipped_family_is_left_out() -> None:
    tried = {kind.qualified for kind in Shipped.__subclasses__()}
    shipped = {"gemv", "norm", "elementwise", "rope", "argmax", "attention"}
    assert {name for name in INSTALLED if name.split("/")[0] in shipped} <= tried
