"""Everything a plugin imports from the core, in one place: the names here stay where they are when the core's modules move.

A name is taken away or changed in meaning only with the next generation of the hook API (``agentcompile.v2``); until then
releases add names. Nothing is imported before it is used, so a plugin that needs no torch loads none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Each name as itself: that is how a type checker reads that a module offers a name which it imports.
if TYPE_CHECKING:
    # isort: off
    from .codegen.naming import rename as rename, source_digest as source_digest
    from .codegen.printing import Dialect as Dialect, Printed as Printed, print_expression as print_expression
    from .errors import (
        AgentCompileError as AgentCompileError, BuildError as BuildError, Cause as Cause, ContractError as ContractError,
        Failure as Failure, Reject as Reject, StageName as StageName, UsageError as UsageError,
        VerificationError as VerificationError, bounded as bounded, last_frames as last_frames,
    )
    from .garbage import uncollected as uncollected
    from .ir.advice import (
        Advice as Advice, AdviceRecord as AdviceRecord, Diagnosis as Diagnosis, Evidence as Evidence, Hint as Hint,
        Question as Question, RejectedItem as RejectedItem, Risk as Risk,
    )
    from .ir.baseline import FRAMEWORK as FRAMEWORK
    from .ir.candidate import (
        ArgumentKind as ArgumentKind, CALLABLE as CALLABLE, Feature as Feature, Kernel as Kernel,
        KernelArgument as KernelArgument, Launch as Launch, Resources as Resources, StepSource as StepSource,
        Tiling as Tiling, Workspace as Workspace, f32 as f32, i32 as i32, i64 as i64, null as null, pointer as pointer, tiles as tiles,
    )
    from .ir.expression import Expression as Expression, Operation as Operation, PointwiseKind as PointwiseKind
    from .ir.graph import (
        Argument as Argument, DType as DType, Graph as Graph, GraphKind as GraphKind, GraphSet as GraphSet, KVSpec as KVSpec,
        LayerHeads as LayerHeads, ModelInfo as ModelInfo, Node as Node, Ref as Ref, Symbol as Symbol, TensorSpec as TensorSpec,
        Value as Value, ValueKind as ValueKind, Workload as Workload,
    )
    from .ir.kind_names import (
        ARGMAX as ARGMAX, ATTENTION as ATTENTION, CONVOLUTION_STEP as CONVOLUTION_STEP, CROSS_ENTROPY as CROSS_ENTROPY,
        ELEMENTWISE as ELEMENTWISE, EXPERT_LINEAR as EXPERT_LINEAR, GATHER as GATHER,
        LINEAR as LINEAR, MASKED_ATTENTION as MASKED_ATTENTION, MATMUL as MATMUL, NORM as NORM, POOL as POOL,
        RECURRENCE_STEP as RECURRENCE_STEP, REDUCTION as REDUCTION, ROPE as ROPE, ROPE_TABLE as ROPE_TABLE, ROUTER as ROUTER, SCAN as SCAN,
        SOFTMAX as SOFTMAX,
    )
    from .ir.plan import (
        Cover as Cover, Fusion as Fusion, Needs as Needs, Origin as Origin, Parameter as Parameter, PlanSpace as PlanSpace,
        Schedule as Schedule, ScheduleSpace as ScheduleSpace, Step as Step, StepSpace as StepSpace,
    )
    from .ir.record import Measurement as Measurement, TuningRecord as TuningRecord
    from .ir.region import (
        Access as Access, Match as Match, MatchSummary as MatchSummary, Operand as Operand, RegionSummary as RegionSummary,
        Role as Role, Scalar as Scalar, SemanticLabel as SemanticLabel,
    )
    from .ir.source_check import argument_values as argument_values, check_source as check_source
    from .ir.target import NO_TARGET as NO_TARGET, Target as Target
    from .ir.verdict import (
        Case as Case, Check as Check, InputFamily as InputFamily, Outcome as Outcome, Trial as Trial, Verdict as Verdict,
    )
    from .ops.aliasing import memory_roots as memory_roots
    from .ops.absorbing import Prologue as Prologue, prologues as prologues, repeats as repeats
    from .ops.bits import same_bits as same_bits
    from .ops.growth import (
        Growth as Growth, cone as cone, express as express, grow as grow, has_one_rounding as has_one_rounding,
        is_pointwise as is_pointwise,
    )
    from .ops.grammar import translate as translate
    from .ops.meaning import evaluate as evaluate
    from .ops.operator_names import operator as operator
    from .ops.odds import Odds as Odds, scores_of as scores_of
    from .ops.reference import Bounded as Bounded, Comparison as Comparison, compare as compare, oracle as oracle
    from .ops.recurrence import RecurrenceCall as RecurrenceCall
    from .ops.region_view import (
        KERNEL_TYPES as KERNEL_TYPES, RegionView as RegionView, is_contiguous as is_contiguous, packed as packed, ref as ref,
    )
    from .ops.schema import argument as argument, canonical as canonical
    from .ops.traffic import unread_bytes as unread_bytes
    from .plugin.advice_json import (
        answer_schema as answer_schema, question_json as question_json, question_key as question_key,
        read_answer as read_answer,
    )
    from .plugin.controls import (
        CONTROL_DEFECTS as CONTROL_DEFECTS, CONTROL_DIGEST as CONTROL_DIGEST, CONTROL_ENTRY as CONTROL_ENTRY,
        control_source as control_source, control_trials as control_trials,
    )
    from .plugin.events import (
        AdviceGiven as AdviceGiven, CandidateFinished as CandidateFinished, Captured as Captured,
        ChainProgress as ChainProgress, Event as Event, FailureRecorded as FailureRecorded, ModelLoaded as ModelLoaded,
        NotStored as NotStored, Preparing as Preparing, RegionSelected as RegionSelected, SearchStarted as SearchStarted,
        Skipped as Skipped, StageFinished as StageFinished, StageStarted as StageStarted, StoreMiss as StoreMiss,
        Warned as Warned, WinnerRefused as WinnerRefused, WorkloadChosen as WorkloadChosen,
    )
    from .plugin.backend import OwnBuild as OwnBuild
    from .plugin.hookspecs import API as API, hookimpl as hookimpl
    from .plugin.interfaces import (
        Advisor as Advisor, Backend as Backend, DecodeRuntime as DecodeRuntime, Frontend as Frontend,
        Implementation as Implementation, KVCacheRuntime as KVCacheRuntime, LoadedModel as LoadedModel, Offer as Offer,
        RegionRule as RegionRule, RuntimeIntegration as RuntimeIntegration, TemplateFamily as TemplateFamily,
        TrialResult as TrialResult, TrialRun as TrialRun, Validator as Validator,
    )
    from .plugin.match_kind import (
        AttributeKind as AttributeKind, MatchKind as MatchKind, OperandKind as OperandKind, READS as READS,
        WEIGHTS as WEIGHTS, position_edges as position_edges,
    )
    from .plugin.phases import PHASES as PHASES
    from .plugin.reserving import Reserved as Reserved
    from .plugin.running import (
        GrowingKVState as GrowingKVState, Heads as Heads, KVState as KVState, ProgramParts as ProgramParts, RunnablePiece as RunnablePiece,
        RunnableProgram as RunnableProgram, Scoring as Scoring, SessionState as SessionState,
    )
    from .plugin.secrets import holds_secret as holds_secret, scrubbed as scrubbed
    from .private_folders import PrivateFolder as PrivateFolder, sweep as sweep
    from .processes.environment import child_environment as child_environment
    from .processes.toolchain import GuardedServer as GuardedServer, run_guarded as run_guarded, serve as serve
    from .runtime.graph_capture import record_program as record_program
    from .runtime.program import Program as Program, Segment as Segment
    from .store import default_root as default_root
    from .ir import kind_names as kind_names, serial as serial
    from .ops import operator_names as operator_names
    # isort: on

# The module of each name, below agentcompile_core. A test holds this equal to the imports above.
_NAMES = {
    "codegen.naming": "rename source_digest",
    "codegen.printing": "Dialect Printed print_expression",
    "errors": "AgentCompileError BuildError Cause ContractError Failure Reject StageName UsageError VerificationError bounded last_frames",
    "garbage": "uncollected",
    "ir.advice": "Advice AdviceRecord Diagnosis Evidence Hint Question RejectedItem Risk",
    "ir.baseline": "FRAMEWORK",
    "ir.candidate": "ArgumentKind CALLABLE Feature Kernel KernelArgument Launch Resources StepSource Tiling Workspace "
                    "f32 i32 i64 null pointer tiles",
    "ir.expression": "Expression Operation PointwiseKind",
    "ir.graph": "Argument DType Graph GraphKind GraphSet KVSpec LayerHeads ModelInfo Node Ref Symbol TensorSpec Value ValueKind Workload",
    "ir.kind_names": "ARGMAX ATTENTION CONVOLUTION_STEP CROSS_ENTROPY ELEMENTWISE EXPERT_LINEAR GATHER LINEAR MASKED_ATTENTION MATMUL NORM"
                     " POOL RECURRENCE_STEP REDUCTION ROPE ROPE_TABLE ROUTER SCAN SOFTMAX",
    "ir.plan": "Cover Fusion Needs Origin Parameter PlanSpace Schedule ScheduleSpace Step StepSpace",
    "ir.record": "Measurement TuningRecord",
    "ir.region": "Access Match MatchSummary Operand RegionSummary Role Scalar SemanticLabel",
    "ir.source_check": "argument_values check_source",
    "ir.target": "NO_TARGET Target",
    "ir.verdict": "Case Check InputFamily Outcome Trial Verdict",
    "ops.aliasing": "memory_roots",
    "ops.absorbing": "Prologue prologues repeats",
    "ops.growth": "Growth cone express grow has_one_rounding is_pointwise",
    "ops.grammar": "translate",
    "ops.meaning": "evaluate",
    "ops.operator_names": "operator",
    "ops.odds": "Odds scores_of",
    "ops.bits": "same_bits",
    "ops.recurrence": "RecurrenceCall",
    "ops.reference": "Bounded Comparison compare oracle",
    "ops.region_view": "KERNEL_TYPES RegionView is_contiguous packed ref",
    "ops.schema": "argument canonical",
    "ops.traffic": "unread_bytes",
    "plugin.advice_json": "answer_schema question_json question_key read_answer",
    "plugin.controls": "CONTROL_DEFECTS CONTROL_DIGEST CONTROL_ENTRY control_source control_trials",
    "plugin.events": (
        "AdviceGiven CandidateFinished Captured ChainProgress Event FailureRecorded ModelLoaded NotStored Preparing "
        "RegionSelected SearchStarted Skipped StageFinished StageStarted StoreMiss Warned WinnerRefused WorkloadChosen"
    ),
    "plugin.backend": "OwnBuild",
    "plugin.hookspecs": "API hookimpl",
    "plugin.interfaces": (
        "Advisor Backend DecodeRuntime Frontend Implementation KVCacheRuntime LoadedModel Offer RegionRule RuntimeIntegration "
        "TemplateFamily TrialResult TrialRun Validator"
    ),
    "plugin.match_kind": "AttributeKind MatchKind OperandKind READS WEIGHTS position_edges",
    "plugin.phases": "PHASES",
    "plugin.reserving": "Reserved",
    "plugin.running": "GrowingKVState Heads KVState ProgramParts RunnablePiece RunnableProgram Scoring SessionState",
    "plugin.secrets": "holds_secret scrubbed",
    "private_folders": "PrivateFolder sweep",
    "processes.environment": "child_environment",
    "processes.toolchain": "GuardedServer run_guarded serve",
    "runtime.graph_capture": "record_program",
    "runtime.program": "Program Segment",
    "store": "default_root",
}
_MODULES = {"serial": "ir.serial", "kind_names": "ir.kind_names", "operator_names": "ops.operator_names"}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_MODULE_OF, *_MODULES]  # noqa: PLE0604  names, every one


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{_MODULES[name]}", __package__)
    if name not in _MODULE_OF:
        raise AttributeError(f"agentcompile_core.plugin_api has no {name!r}; it has {', '.join(sorted(__all__))}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __package__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
