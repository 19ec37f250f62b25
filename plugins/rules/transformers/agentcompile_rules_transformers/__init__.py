"""Region rules for one token of a transformer, and for products, softmaxes and reductions of any module. Kinds of matches: ``kinds``."""

from collections.abc import Iterable

from agentcompile_core.plugin_api import RegionRule, hookimpl

from .attention import AttentionRule
from .convolution_step import ConvolutionStepRule
from .cross_entropy import CrossEntropyRule
from .elementwise import ElementwiseRule
from .experts import ExpertRule
from .kinds import KINDS
from .linear import LinearRule
from .lookup import ArgmaxRule, GatherRule
from .masked_attention import MaskedAttentionRule
from .matmul import MatmulRule
from .norm import NormRule
from .pool import PoolRule
from .recurrence_step import RecurrenceStepRule
from .reduction import ReductionRule
from .rope import RopeRule, RopeTableRule
from .rope_heads import RopeHeadsRule
from .router import RouterRule
from .scan import ScanRule
from .softmax import SoftmaxRule

__all__ = ["KINDS", "agentcompile_region_rules"]


@hookimpl
def agentcompile_region_rules() -> Iterable[RegionRule]:
    """The rules for one-token graphs of transformers."""
    return (LinearRule(), AttentionRule(), NormRule(), RopeRule(), RopeHeadsRule(), RopeTableRule(), ElementwiseRule(), GatherRule(),
            ArgmaxRule(), SoftmaxRule(), ReductionRule(), MatmulRule(), ExpertRule(), RouterRule(), MaskedAttentionRule(),
            ScanRule(), PoolRule(), CrossEntropyRule(), RecurrenceStepRule(), ConvolutionStepRule())
