"""Everything a plugin imports from the core, in one place: the names here stay where they are when the core's modules move.

A name is taken away or changed in meaning only with the next generation of the hook API (``agentcompile.v2``); until then
releases add names. Nothing is imported before it is used, so a plugin that needs no torch loads none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

# The module of each name, below agentcompile_core. A test holds this equal to the imports above.
_NAMES = {
    "codegen.naming": "rename source_digest",
    "codegen.printing": "Dialect Printed print_expression",
    "errors": "AgentCompileError BuildError Cause ContractError Failure Reject StageName UsageError VerificationError bounded last_frames",
    "ir.advice": "Advice AdviceRecord Diagnosis Evidence Hint Question RejectedItem Risk",
    "ir.baseline": "FRAMEWORK",
    "ir.candidate": "ArgumentKind CALLABLE Feature Kernel KernelArgument Launch Resources StepSource Workspace f32 i32 i64 null pointer",
    "ir.expression": "Expression Operation PointwiseKind",
    "ir.graph": "Argument DType Graph GraphKind GraphSet KVSpec ModelInfo Node Ref Symbol TensorSpec Value ValueKind Workload",
    "ir.kind_names": "ARGMAX ATTENTION ELEMENTWISE GATHER LINEAR NORM ROPE ROPE_TABLE",
    "ir.plan": "Origin Parameter Schedule ScheduleSpace Step StepSpace",
    "ir.record": "Measurement TuningRecord",
    "ir.region": "Access Match MatchSummary Operand RegionSummary Role Scalar SemanticLabel",
    "ir.source_check": "argument_values check_source",
    "ir.target": "NO_TARGET Target",
    "ir.verdict": "Case Check InputFamily Outcome Trial Verdict",
    "ops.growth": "Growth express grow has_one_rounding is_pointwise translate",
    "ops.names": "operator",
    "ops.reference": "Bounded Comparison compare oracle",
    "ops.region_view": "KERNEL_TYPES RegionView is_contiguous packed ref",
    "ops.schema": "argument canonical",
    "plugin.advice_json": "answer_schema question_json question_key read_answer",
    "plugin.controls": "CONTROL_DEFECTS CONTROL_DIGEST CONTROL_ENTRY control_source control_trials",
    "plugin.events": "AdviceGiven CandidateFinished Captured ChainProgress Event FailureRecorded ModelLoaded NotStored Preparing RegionSelected SearchStarted Skipped StageFinished StageStarted StoreMiss Warned WinnerRefused WorkloadChosen",
    "plugin.hookspecs": "API hookimpl",
    "plugin.interfaces": "Advisor Backend DecodeRuntime Frontend Implementation KVCacheRuntime LoadedModel Offer RegionRule RuntimeIntegration TemplateFamily TrialResult TrialRun Validator",
    "plugin.match_kind": "AttributeKind MatchKind OperandKind READS WEIGHTS position_edges",
    "plugin.running": "KVState ProgramParts RunnablePiece RunnableProgram SessionState",
    "processes.environment": "child_environment",
    "processes.toolchain": "GuardedServer run_guarded serve",
    "runtime.graph_capture": "composed settle_generator",
    "runtime.program": "Program Segment",
    "store": "default_root",
}
_MODULES = {"serial": "ir.serial", "kind_names": "ir.kind_names"}
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
