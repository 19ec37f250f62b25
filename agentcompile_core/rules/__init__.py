"""The core's own region rules, offered like any plugin's. Match kinds, operands and attributes: see ``match_kinds``."""

from collections.abc import Iterable

from ..plugin.hookspecs import hookimpl
from ..plugin.interfaces import RegionRule
from .attention import AttentionRule
from .elementwise import ElementwiseRule
from .linear import LinearRule
from .lookup import ArgmaxRule, GatherRule
from .norm import NormRule
from .rope import RopeRule, RopeTableRule


@hookimpl
def agentcompile_region_rules() -> Iterable[RegionRule]:
    """The rules for one-token graphs of transformers."""
    return (LinearRule(), AttentionRule(), NormRule(), RopeRule(), RopeTableRule(), ElementwiseRule(), GatherRule(), ArgmaxRule())
