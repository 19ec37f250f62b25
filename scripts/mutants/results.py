"""The results file: every mutant with what became of it, and counts by class of mistake and by family."""

import json
import platform
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import asdict
from checkout import commit

from agentcompile_core.version import __version__

from .equivalence import CASES
from .judging import (
    ELIGIBLE,
    EQUIVALENT,
    KILLED,
    NO_EFFECT,
    NOT_COMPILING,
    OTHER_BITS,
    SAME_CODE,
    WITHIN,
    Asked,
    Finding,
    judges_digest,
)
from .subjects import BACKEND, LIBRARY, TARGET, load, subjects

FEWEST, MOST_EQUIVALENT = 200, 0.10
NO_GPU = {"gpu": "no GPU, kernels judged on the emulator", "gpu_uuid": "none", "driver": "none"}
COLUMNS = ("generated", "not compiling", "killed by numerics", "killed by emulation", "killed in execution", "identical machine code",
           "equivalent by proof", "within the budget by proof", "wrong and eligible")


def row_of(findings: Sequence[Finding]) -> dict[str, int]:
    """Counts of some findings, by column."""
    outcomes, judges = Counter(f.outcome for f in findings), Counter(f.by for f in findings if f.outcome == KILLED)
    counts = (len(findings), outcomes[NOT_COMPILING], judges["numerics"], judges["emulation"], judges["execution"], outcomes[SAME_CODE],
              outcomes[EQUIVALENT], outcomes[WITHIN], outcomes[ELIGIBLE] + outcomes[NO_EFFECT] + outcomes[OTHER_BITS])
    return dict(zip(COLUMNS, counts, strict=True))


def family_of(finding: Finding) -> str:
    """The family whose file was mutated, or the device library."""
    return _family_of(finding.file)


@cache
def _family_of(file: str) -> str:
    if file.startswith(LIBRARY):
        return "device library"
    return next(subject.family for subject in subjects().values() if file in subject.files())


def by(findings: Sequence[Finding], key: Any) -> dict[str, dict[str, int]]:
    """``row_of`` by what ``key`` says of a finding."""
    names = sorted({key(finding) for finding in findings})
    return {name: row_of([finding for finding in findings if key(finding) == name]) for name in names}


def document(findings: Sequence[Finding], asked: Asked, of: str | None = None) -> dict[str, Any]:
    """The content of the results file; ``of``: the commit, where there is no git here."""
    return {
        "schema": 1, **NO_GPU, "versions": versions(), "commit": commit(of), "date": time.strftime("%Y-%m-%d"),
        "seed": asked.seed, "target": TARGET, "checks": judges_digest(), "earlier_kills_trusted": asked.trust_kills,
        "total": row_of(findings), "by_class": by(findings, lambda finding: finding.group), "by_family": by(findings, family_of),
        "rows": [{key: value for key, value in asdict(finding).items() if value} for finding in findings],
    }


def versions() -> dict[str, str]:
    """Versions of what takes part in judging."""
    return {"agentcompile": __version__, "python": platform.python_version(), "torch": metadata.version("torch"),
            "emulation": load().find("agentcompile_backends", BACKEND).compiler()}


def shortcomings(found: dict[str, Any]) -> list[str]:
    """What of the acceptance does not hold, in words; empty where all does."""
    total = found["total"]
    judged = total["generated"] - total["not compiling"]
    equivalent = total["identical machine code"] + total["equivalent by proof"] + total["within the budget by proof"]
    said = [] if judged >= FEWEST else [f"{judged} mutants were judged; at least {FEWEST} are asked for"]
    if total["wrong and eligible"]:
        said.append(f"{total['wrong and eligible']} mutants are eligible and not shown to be right")
    if equivalent > MOST_EQUIVALENT * judged:
        said.append(f"{equivalent} of {judged} mutants are equivalent; at most {MOST_EQUIVALENT:.0%} may be")
    doubtful = [row["id"] for row in found.get("rows", ()) if not is_shown(row)]
    return [*said, f"without a proof or {CASES} random cases: {', '.join(doubtful)}"] if doubtful else said


def is_shown(row: dict[str, Any]) -> bool:
    """Whether a row has what its outcome asks for: a proof where it is called right, random cases where it was let through anywhere."""
    compared = row.get("cases", 0) >= CASES
    if row["outcome"] in (EQUIVALENT, WITHIN):
        return compared and bool(row.get("proof"))
    return compared or not row.get("other_bits_on")


def write(path: Path, found: dict[str, Any]) -> None:
    """Write the results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table(rows: dict[str, dict[str, int]]) -> str:
    """Rows as text for a terminal."""
    lines = [" " * 18 + "".join(f"{name.replace('killed ', ''):>24}" for name in COLUMNS)]
    return "\n".join([*lines, *(f"{name:18}" + "".join(f"{row[column]:>24}" for column in COLUMNS) for name, row in rows.items())])
