"""The validator ``emulation``: a candidate in the emulator's checked mode, on the inputs of its trial's cases."""

from typing import Any

from attrs import evolve, field, frozen
from attrs.validators import gt

from agentcompile_core.plugin_api import (
    Backend,
    BuildError,
    Case,
    Cause,
    Check,
    ContractError,
    Outcome,
    Role,
    Trial,
    TrialRun,
    UsageError,
    Validator,
    Verdict,
)

from .backend import FEATURES
from .checking import run_checked
from .controls import control_trials
from .module import EmulationError, LaunchOptions, ThreadOrder
from .toolchain import COMPILER, GXX, find_toolchain

LANGUAGE = "cuda"
MAX_BYTES = 24 << 20  # of all operands: about two seconds of checked execution
ORDERS = (LaunchOptions(lazy_copies=True), LaunchOptions(order=ThreadOrder.RANDOM, warp_skewed=False, lazy_copies=True))
_CAUSES = (("misaligned", Cause.MISALIGNED), ("deadline", Cause.TIMEOUT), ("out of bounds", Cause.MEMORY_FAULT), ("race:", Cause.RACE))


@frozen(kw_only=True)
class Settings:
    """``[plugin.emulation]``, as far as it is the validator's."""

    max_bytes: int = field(default=MAX_BYTES, validator=gt(0), metadata={"doc": "bytes of all operands beyond which it has nothing to say"})
    compiler: str = field(default=GXX, metadata=COMPILER)


class EmulationValidator(Validator):
    """Refuses races, accesses out of bounds, uninitialised reads, barrier errors and reads before the dependency wait.

    It says nothing about values (the numerics validator does) or speed. Sources with features that the emulator lacks,
    and matches of more than 24 MiB (a setting), are left to the GPU's own checks.
    """

    name = "emulation"
    version = 2
    scope = "winner"
    unasked = True
    settings_class = Settings

    def applies(self, trial: Trial) -> bool:
        """Whether the source is small enough and can be emulated, and g++ and the CUDA headers are here."""
        source = trial.source
        total = sum(operand.spec.nbytes for operand in trial.match.operands) + sum(w.nbytes for w in source.workspaces)
        if source.language != LANGUAGE or not source.launches or total > self.settings.max_bytes:
            return False
        if any(feature not in FEATURES for feature in source.features):
            return False
        try:
            find_toolchain(self.settings.compiler)
        except UsageError:
            return False
        return True

    def controls(self, backend: Backend) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
        """A kernel without a mistake, and the same kernel with a barrier missing, an index too far, and no dependency wait.

        Raises:
            ContractError: the backend builds no sources of the language that is emulated.
        """
        if LANGUAGE not in backend.languages:
            raise ContractError(f"it judges {LANGUAGE} sources alone, and the backend {backend.name} builds {', '.join(backend.languages)}")
        return control_trials()

    def check(self, trial: Trial, run: TrialRun) -> Verdict:
        """Run the first and the last case, each in its own thread order, random ones drawn from the case's seed.

        ``run`` makes their inputs, and runs nothing.
        """
        checks: list[Check] = []
        cases = (trial.cases[0], trial.cases[-1])
        for case, options in zip(cases, ORDERS, strict=True):
            name = f"{options.order.name.lower()} {case.family} position {case.position}"
            try:
                run_checked(trial.source, _operands(trial, case, run), evolve(options, seed=case.seed), compiler=self.settings.compiler)
            except EmulationError as exc:
                checks.append(Check(name=name, outcome=Outcome.FAIL, detail=str(exc)))
                return Verdict(validator=self.name, outcome=Outcome.FAIL, checks=tuple(checks), cause=_cause(str(exc)), message=str(exc))
            except BuildError as exc:
                checks.append(Check(name="build", outcome=Outcome.FAIL, detail=str(exc)))
                return Verdict(validator=self.name, outcome=Outcome.FAIL, checks=tuple(checks), cause=Cause.COMPILE, message=str(exc))
            checks.append(Check(name=name, outcome=Outcome.PASS))
        return Verdict(validator=self.name, outcome=Outcome.PASS, checks=tuple(checks))


def _operands(trial: Trial, case: Case, run: TrialRun) -> dict[str, Any]:
    """CPU tensors of every operand: inputs as the case makes them, outputs full of NaN."""
    import torch

    tensors = run.inputs(case, "cpu")
    for operand in trial.match.operands:
        if operand.role is Role.OUTPUT:
            dtype = getattr(torch, operand.spec.dtype.value)
            tensors[operand.name] = torch.full(operand.spec.shape, float("nan") if dtype.is_floating_point else -77, dtype=dtype)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _cause(message: str) -> Cause:
    """The class of a failure, from the emulator's own fixed phrases."""
    return next((cause for phrase, cause in _CAUSES if phrase in message), Cause.CONTRACT)


