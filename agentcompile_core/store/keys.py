"""Every key of the store in one place: canonical digests of every input of what is stored under them."""

from collections.abc import Iterable
from typing import Any

import attrs

from ..ir import serial
from ..ir.candidate import StepSource
from ..ir.graph import Graph, Workload
from ..ir.region import Match
from ..ir.target import Target
from ..ir.verdict import Trial
from ..plugin.interfaces import Backend
from ..plugin.settings import identity
from ..version import __version__
from .code import capturing_code, judging_code
from .code import code_of as code_of

Versions = tuple[tuple[str | int, ...], ...]  # names of plugins' offers with their versions and what their settings add


def libraries_digest(backend: Backend) -> str:
    """Digest of what sources of any language of ``backend`` may include."""
    return serial.digest([[language, backend.library_digest(language)] for language in backend.languages])


def environment(backend: Backend, validators: Versions = ()) -> str:
    """Digest of what a result depends on beside the question.

    That is: backend, compiler, what sources may include, device, driver, torch, validators and core, each with its version;
    and the code of the core's oracle, comparisons and timing.
    """
    tools = (backend.name, backend.version, backend.compiler(), libraries_digest(backend), *identity(backend))
    return serial.digest(*tools, backend.identity(), validators, __version__, judging_code(), length=32)


def kernel_key(source: StepSource, target: Target, backend: Backend) -> str:
    """Key of a built kernel: its text, what it may include, the architecture, the backend and its compiler."""
    library = backend.library_digest(source.language)
    return "kernel-" + serial.digest(source.identity, library, target.arch, backend.name, backend.compiler(), *identity(backend), length=32)


def capture_key(code: str, workload: Workload, versions: tuple[str, ...]) -> str:
    """Key of captured graphs: all that they depend on (capture.identity), the workload, versions of torch, transformers, Python, us.

    And the core's code that makes graphs: what another one made before may lack what this one finds, or hold what it mends.
    """
    return "capture-" + serial.digest(code, workload, versions, __version__, capturing_code(), length=32)


def record_key(trial: Trial, where: str, kind_code: str = "") -> str:
    """Key of an evaluated candidate: the whole trial, the ``environment``, and the code of the match's kind (``code_of``)."""
    said = {one.name: getattr(trial, one.name) for one in attrs.fields(Trial) if one.name != "source"}
    return "record-" + serial.digest(said, trial.source.identity, where, kind_code, length=32)


def winner_key(record: str, validator: tuple[str | int, ...]) -> str:
    """Key of what a validator of winners said of an evaluated candidate: the record's key, and the validator with its version and code."""
    return "winner-" + serial.digest(record, validator, length=32)


def baseline_key(match: Match, graph: Graph, where: str) -> str:
    """Key of the framework's time of a match."""
    return "baseline-" + serial.digest(match, graph, where, length=32)


def search_key(records: Iterable[str], servers: Any, budget: Any, where: str) -> str:
    """Key of one call of validate: its candidates (by their keys), who serves (with versions), the budget and the environment."""
    return "search-" + serial.digest(sorted(records), servers, budget, where, length=32)


def run_key(servers: Any, budget: Any, target: Target, where: str) -> str:
    """Key of the rounds of one compilation: who serves which region, the budget, the target and the environment."""
    return "run-" + serial.digest(servers, budget, target, where, length=32)


def servers_key(signature: str, target: Target, where: str) -> str:
    """Key of the list of those who took part in searches of one region."""
    return "servers-" + serial.digest(signature, target, where, length=32)


def chain_key(question: Any, where: str) -> str:
    """Key of an answer of the captured chain: the question without its timings, and the environment."""
    return "chain-" + serial.digest(question, where, length=32)


def ranges_key(question: Any, budget_s: float, where: str) -> str:
    """Key of how many later ranges of positions were judged: the question of the first of them, the budget and the environment."""
    return "ranges-" + serial.digest(question, budget_s, where, length=32)
