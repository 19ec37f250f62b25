"""Selections, statistics, plugins and the machine, as plain documents (for --json) and as text for people."""

import importlib.util
import platform
import shutil
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

from ..errors import Failure, one_line
from ..ir.bundle import Manifest
from ..ir.graph import GraphKind, GraphSet
from ..ir.record import TuningRecord
from ..ir.selection import Basis, SelectedStep, Selection
from ..plugin import failures
from ..plugin.catalog import Catalog
from ..stages.emit.evidence import Evidence
from ..version import __version__
from .candidates import candidates_document as candidates_document
from .candidates import candidates_text as candidates_text
from .candidates import untried_text as untried_text
from .configured import config_document as config_document
from .configured import config_text as config_text
from .configured import files_document as files_document
from .configured import files_text as files_text
from .region import region_document as region_document
from .region import region_text as region_text
from .tables import table as table


def step_document(step: SelectedStep) -> dict[str, Any]:
    """One selected step as plain types."""
    measured, baseline = step.measurement, step.baseline
    return {"label": step.label, "implementation": step.step.implementation, "origin": step.step.origin.value,
            "version": step.version, "schedule": dict(step.step.schedule.items), "basis": step.basis.value,
            "us": measured.us if measured else None,
            "floor_us": measured.floor_us if measured else None, "baseline_us": baseline.us if baseline else None,
            "max_abs": step.max_abs, "max_rel": step.max_rel, "reason": step.reason, "nodes": list(step.nodes)}


def selections_document(selections: Iterable[Selection]) -> list[dict[str, Any]]:
    """Selections as plain types."""
    return [{"region": s.region, "signature": s.signature, "from_position": s.start, "fusion": s.cover.fusion.value,
             "basis": s.basis.value, "us": s.region_us,
             "baseline_us": s.baseline_us, "steps": [step_document(step) for step in s.steps],
             "fallbacks": [{"what": what, "why": why} for what, why in s.fallback_reasons]} for s in selections]


FAILURE = 8000  # characters of one


def failures_text(found: Iterable[Failure]) -> str:
    """One failure a line, with how often it was seen."""
    return "\n".join(f"  {one_line(str(failure), FAILURE)}" for failure in found) or "  none"


def states_text(graphs: GraphSet) -> str:
    """What each step hands to the next beside K and V; empty: nothing."""
    if not graphs.states:
        return ""
    size = sum(spec.nbytes for spec in graphs.states.values())
    prompts = "; prompts run in whole chunks, and token by token what is left" if graphs.whole_chunks else ""
    return f"states: {len(graphs.states)} of fixed size, {size} bytes in all, written in place by every step, zero before a prompt{prompts}"


def prompts_text(graphs: GraphSet, attends: str = "") -> str:
    """How prompts run; ``attends``: what later chunks attend over, where that is known. Empty: nothing was captured for them."""
    sizes = sorted({g.tokens for g in graphs.of_kind(GraphKind.PREFILL)})
    over = {"live": ", later ones over what is cached", "capacity": ", later ones over the whole cache under a mask"}
    return f"prompts: chunks of {', '.join(map(str, sizes))} tokens{over.get(attends, '')}" if sizes else ""


def explain_text(
    manifest: Manifest, selections: Iterable[Selection], records: Iterable[TuningRecord], found: Evidence, graphs: GraphSet | None = None
) -> str:
    """Why each step got what it got, and what it was compared with."""
    parts = [one_line(f"{manifest.model.name} ({manifest.model.model_type}) for {manifest.target.name} ({manifest.target.arch}), "
                      f"{manifest.workload.dtype.value}, context {manifest.workload.max_context}")]
    if manifest.eager_reason:
        parts.append(one_line(f"everything runs on the framework: {manifest.eager_reason}"))
    if manifest.provisional:
        parts.append("validated without their hardware, not measured: these kernels are provisional and are not launched on it before they "
                     "are measured there")
    parts += [text for text in ([states_text(graphs), prompts_text(graphs)] if graphs is not None else []) if text]
    chosen = tuple(selections)
    parts += [selection_text(s) for s in chosen]
    parts.append("candidates evaluated\n" + candidates_text(records, chosen))
    parts.append("not tried\n" + untried_text(found.tried))
    parts.append("failures recorded\n" + failures_text(found.failures))
    return "\n\n".join(parts)


def selection_text(selection: Selection) -> str:
    """One region: its steps and why, then what stays on the framework and why."""
    where = f", from position {selection.start} on" if selection.start else ""
    lines = [f"region {selection.region}{where}: {selection.cover.fusion.value} fusion, {selection.basis.value}"]
    if all(step.basis is Basis.PROVISIONAL for step in selection.steps):
        rows = [(s.label, s.step.implementation, s.step.origin.value, f"{s.max_rel:.1e}", str(s.step.schedule)) for s in selection.steps]
        lines += [table(rows, ("step", "implementation", "origin", "max rel", "schedule"))] if rows else []
    else:
        head = ("step", "implementation", "origin", "us", "of floor", "framework us", "why", "schedule")
        lines.append(table([_measured_row(s) for s in selection.steps], head))
    lines += ["  " + one_line(f"framework: {what}: {why}") for what, why in selection.fallback_reasons]
    return "\n".join(lines)


def _measured_row(step: SelectedStep) -> tuple[str, ...]:
    us = f"{step.measurement.us:.2f}" if step.measurement else "-"
    floor = f"{step.measurement.share_of_floor:.0%}" if step.measurement and step.measurement.floor_us else "-"
    base = f"{step.baseline.us:.2f}" if step.baseline else "-"
    return (step.label, step.step.implementation, step.step.origin.value, us, floor, base, step.reason, str(step.step.schedule))


def statistics_text(statistics: dict[str, Any]) -> str:
    """The pipeline's counts, one a line."""
    s = statistics
    rows = [("IR nodes", s["nodes"]), ("regions", f"{s['regions']} ({s['merged_regions']} after merging equal ones)"),
            ("plans (covers)", s["plans"]), ("candidates in the space", s["candidates"]), ("lowered", s["lowered"]), ("built", s["built"]),
            ("validated", s["validated"]), ("schedules not tried", s["untried"]),
            ("regions advised", s["advised"]), ("selected steps", s["selected"]), ("failures recorded", s["failures"]),
            ("files / signatures", f"{s['files']} / {s['signatures']}")]
    if s["selected_us"]:
        rows.append(("selected latency", f"{s['selected_us'][0]:.2f} to {s['selected_us'][1]:.2f} us"))
    rows.append(("seconds", ", ".join(f"{k} {v:.1f}" for k, v in s["seconds"].items())))
    return "\n".join(f"  {name:<24} {value}" for name, value in rows)


def compilation_text(compiled: Any, out: str | None) -> str:
    """What `agentcompile compile` prints."""
    graphs, context = compiled.graphs, compiled.context
    parts = [f"{graphs.model.name} ({graphs.model.model_type}) for {context.target.name} ({context.target.arch})",
             statistics_text(compiled.statistics)]
    if graphs.eager_reason:
        parts.append(f"everything runs on the framework: {graphs.eager_reason}")
    parts += [text for text in [states_text(graphs), prompts_text(graphs, context.config.prefill)] if text]
    parts += [selection_text(s) for s in compiled.compilation.selections]
    parts += [f"note: {note}" for note in compiled.notes]
    if compiled.compilation.failures:
        parts.append("failures recorded\n" + failures_text(compiled.compilation.failures))
    if compiled.compilation.provisional:
        parts.append(f"no {context.target.name} here: kernels were built and validated without it; times, selection by speed and tokens "
                     "per second need one")
    if out:
        parts.append(f"bundle: {out}")
    return "\n".join(parts)


def bench_text(rows: Sequence[dict[str, Any]], notes: Sequence[str]) -> str:
    """Timings as a table."""
    cells = [(r["system"], f"{r['e2e_ms']:.1f}", f"{r['prefill_ms']:.1f}" if r.get("prefill_ms") else "-", f"{r['step_ms']:.3f}",
              f"{1e3 / r['step_ms']:.1f}", f"{r['speedup']:.2f}x", f"{r['spread_ms']:.1f}") for r in rows]
    text = table(cells, ("system", "ms", "prefill ms", "ms per token", "tokens/s", "over eager", "spread ms"))
    return "\n".join([text, *(f"note: {n}" for n in notes)])


def plugins_document(catalog: Catalog) -> dict[str, Any]:
    """Plugins and failures as plain types."""
    return {"plugins": [{"name": p.name, "distribution": p.distribution, "state": p.state, "offers": list(p.offers), "message": p.message}
                        for p in catalog.plugins],
            "failures": failures.document(catalog.failures)}


def plugins_text(catalog: Catalog) -> str:
    """Plugins as a table, failures below."""
    rows = [(p.name, p.distribution, p.state, ", ".join(p.offers), p.message) for p in catalog.plugins]
    return table(rows, ("plugin", "distribution", "state", "offers", "message"))


def doctor_facts(catalog: Catalog, misconfigured: str = "") -> list[dict[str, Any]]:
    """What this machine has, with the plugins as they are configured; required things that are missing make `doctor` exit with 1.

    ``misconfigured``: why the configuration cannot be used, so that nothing of it was applied.
    """
    facts = [_fact("python", platform.python_version(), True, required=True), _fact("agentcompile-core", __version__, True, required=True)]
    for package, required in (("torch", True), ("transformers", True), ("safetensors", True), ("litellm", False),
                              ("flash-attn", False), ("pybind11", False), ("triton", False)):
        facts.append(_package(package, required))
    facts.append(_accelerator())
    compiler = shutil.which("g++")
    facts.append(_fact("C++ compiler", compiler or "g++ not found: install it for emulators and bundle extensions", bool(compiler)))
    if misconfigured:
        facts.append(_fact("configuration", misconfigured, False, required=True))
    for name, backend in catalog.backends.items():
        answer = catalog.guard(backend.available, stage=_load_stage(), plugin=name, subject="available")
        identity = catalog.guard(backend.identity, stage=_load_stage(), plugin=name, subject="identity")
        compiler = catalog.guard(backend.compiler, stage=_load_stage(), plugin=name, subject="compiler")
        seen = f"kernels can be launched here ({identity or 'unknown'})" if answer is True else getattr(answer, "reason", "failed")
        facts.append(_fact(f"backend {backend.name}", f"{seen}; compiler: {compiler or 'none'}", answer is True))
    broken = [p.name for p in catalog.plugins if p.state == "failed"]
    facts.append(_fact("plugins", f"{len(catalog.plugins)} found" + (f", failed: {', '.join(broken)}" if broken else ""), not broken))
    return facts


def _load_stage() -> Any:
    from ..errors import StageName

    return StageName.LOAD


def _fact(name: str, seen: str, ok: bool, required: bool = False) -> dict[str, Any]:
    return {"name": name, "seen": seen, "ok": ok, "required": required}


def _package(name: str, required: bool) -> dict[str, Any]:
    try:
        return _fact(name, metadata.version(name), True, required)
    except metadata.PackageNotFoundError:
        return _fact(name, "not installed", False, required)


def _accelerator() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return _fact("accelerator", "torch is not installed", False)
    from ..runtime.device import described

    seen = described()
    return _fact("accelerator", seen or "torch sees none: kernels are built and validated, their speed cannot be measured", bool(seen))


def doctor_text(facts: Sequence[dict[str, Any]]) -> str:
    """Facts as a table."""
    return table([("ok" if f["ok"] else "MISSING" if f["required"] else "no", f["name"], f["seen"]) for f in facts], ("", "what", "seen"))
