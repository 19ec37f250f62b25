"""What each command does. Every command prints text, or with --json one document on standard output."""

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import report
from ..api import arguments
from ..configuration import Config
from ..errors import UsageError, visible
from ..ir import serial
from ..plugin import failures, settings
from ..plugin.discovery import load_catalog
from ..report import audit, audit_words
from ..runtime import bundle_reader
from ..stages.emit import check_folder, evidence
from . import checks, source_hint
from .cache import cache_command
from .parser import parser
from .progress import Progress


def _compiled(options: argparse.Namespace, config: Config, *, run_on: str = "auto", meta: bool = False) -> Any:
    from .. import api
    from ..store import Store

    source_hint.say_executed(options.model)
    options.progress = Progress(quiet=options.json, log=options.log)
    return api.compile(options.model, dtype=options.dtype, max_context=options.context, config=config,
                       store=Store(None) if options.no_cache else None, report=options.progress, meta=meta, run_on=run_on,
                       **_weights(options))


def _weights(options: argparse.Namespace) -> dict[str, Any]:
    """The seed of random weights where they were asked for; nothing where the model's own are wanted."""
    return {"random_weights": 0} if options.random_weights else {}


def _print(options: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    if options.json:
        print(json.dumps(document, indent=1, sort_keys=True), file=options.stdout)
    else:
        print(visible(text))  # names and messages may be somebody else's: of a bundle, a service, a plugin


def compile_command(options: argparse.Namespace) -> int:
    """Compile, print the statistics, write the bundle."""
    config = checks.config_of(options)
    if options.out:
        check_folder(Path(options.out))  # before the work, not after it
    compiled = _compiled(options, config, run_on="nothing", meta=options.meta)
    document = {"model": compiled.graphs.model.name, "target": compiled.context.target.name, "statistics": compiled.statistics,
                "notes": list(compiled.notes), "selections": report.selections_document(compiled.compilation.selections),
                "failures": failures.document(compiled.compilation.failures),
                "search": serial.unstructure(list(compiled.compilation.tried))}
    if options.out:
        document["bundle"] = str(compiled.save(options.out))
    for note in compiled.loaded.notes:
        print(visible(f"note: {note}"), file=sys.stderr)
    _print(options, document, report.compilation_text(compiled, options.out))
    return 0


def generate_command(options: argparse.Namespace) -> int:
    """Generate and print text, streaming on a terminal."""
    config, choosing, prompt = checks.config_of(options), checks.choosing(options), checks.prompt_of(options)
    compiled = _runnable(options, config)
    if compiled.tokenizer is None:
        raise UsageError(f"{compiled.loaded.name} has no tokenizer, so it cannot read text; use the Python API with token ids")
    for note in compiled.notes:
        print(visible(f"note: {note}"), file=sys.stderr)
    ids = compiled.tokenizer(prompt, return_tensors="pt").input_ids
    known, streamer = compiled.notes, None
    if not options.json:
        from transformers import TextStreamer

        streamer = TextStreamer(compiled.tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is among the notes
        out = compiled.generate(ids, options.max_new_tokens, attention_mask=ids.new_ones(ids.shape), streamer=streamer,
                                seed=options.seed, **_ending(compiled), **choosing)
    for note in compiled.notes[len(known):]:
        print(visible(f"note: {note}"), file=sys.stderr)
    if options.json:
        text = compiled.tokenizer.decode(out[0], skip_special_tokens=True)
        print(json.dumps({"text": text, "prompt_tokens": ids.shape[1], "new_tokens": out.shape[1] - ids.shape[1],
                          "notes": list(compiled.notes)}), file=options.stdout)
    return 0


def _runnable(options: argparse.Namespace, config: Config) -> Any:
    from .. import api

    if not options.bundle:
        if options.model is None:
            raise UsageError(f"{options.command} needs a model, or --bundle DIR and the model")
        if options.command == "generate":
            checks.check_tokenizer(options.model)
        return _compiled(options, config, run_on=options.run_on)
    model = options.model or source_hint.model_of(Path(options.bundle))
    source_hint.say_executed(model)
    return api.load(options.bundle, model, config=config, run_on=options.run_on,
                    report=Progress(quiet=options.json), **_weights(options))


def _ending(compiled: Any) -> dict[str, Any]:
    """The tokenizer's end of text where the model's generation_config names none."""
    settings = getattr(compiled.loaded.module, "generation_config", None)
    if settings is not None and settings.eos_token_id is not None:
        return {}
    return {"eos_token_id": compiled.tokenizer.eos_token_id}


def bench_command(options: argparse.Namespace) -> int:
    """Time ours and the baselines, alternating."""
    from ..report.bench import check, compare

    config = checks.config_of(options)
    baselines = tuple(b for b in options.baselines.split(",") if b)
    check(options.input, options.output, options.repetitions, baselines)
    compiled = _compiled(options, config)
    rows = compare(compiled, prompt=options.input, new_tokens=options.output, repetitions=options.repetitions, baselines=baselines)
    _print(options, {"rows": rows, "notes": list(compiled.notes)}, report.bench_text(rows, compiled.notes))
    return 0


def trace_command(options: argparse.Namespace) -> int:
    """Trace one layer of a decode step, and name the largest losses."""
    from ..report import trace

    config = checks.config_of(options)
    checks.check_trace(options)
    line = _runnable(options, config).trace(options.position, layer=options.layer, repetitions=options.repetitions)
    if options.svg:
        Path(options.svg).write_text(trace.trace_picture(line), encoding="utf-8")
    _print(options, trace.trace_document(line), trace.trace_text(line))
    return 0


def explain_command(options: argparse.Namespace) -> int:
    """Say why each step got what it got."""
    installed = bundle_reader.read(Path(options.bundle))
    found = evidence.read(Path(options.bundle))
    if options.region is not None:
        region = report.region_document(options.region, found)
        _print(options, region, report.region_text(region))
        return 0
    document = {"model": installed.manifest.model.name, "target": installed.manifest.target.name,
                "selections": report.selections_document(installed.selections),
                "candidates": report.candidates_document(installed.records, installed.selections),
                "search": serial.unstructure(list(found.tried)),
                "failures": failures.document(found.failures)}
    text = report.explain_text(installed.manifest, installed.selections, installed.records, found, installed.graphs)
    _print(options, document, text)
    return 0


def audit_command(options: argparse.Namespace) -> int:
    """Make every decision of a run again; 1 where one does not follow from the records."""
    folder = Path(options.run)
    installed, found = bundle_reader.read(folder), evidence.read(folder)
    if found.decisions is None:
        reason = installed.manifest.eager_reason
        if not reason:
            raise UsageError(f"{folder} has no {evidence.DECISIONS}: an older version wrote it; compile the model again")
        _print(options, {"decisions": [], "follow": 0, "do_not_follow": 0, "eager_reason": reason},
               f"nothing was decided: everything runs on the framework: {reason}")
        return 0
    made = audit.audit(installed.selections, installed.records, found.decisions, installed.programs)
    document = {"model": installed.manifest.model.name, "target": installed.manifest.target.name, **audit_words.document(made),
                "failures": failures.document(found.failures)}
    _print(options, document, audit_words.text(made))
    return 0 if not document["do_not_follow"] else 1


def advice_command(options: argparse.Namespace) -> int:
    """Say what the advice behind bundles of one model was worth."""
    from ..report import worth

    folders, searches, manifests = [Path(name) for name in dict.fromkeys(options.bundles)], [], {}
    for folder in folders:
        installed, found = bundle_reader.read(folder), evidence.read(folder)
        if found.decisions is None:
            reason = installed.manifest.eager_reason
            why = f"everything in it runs on the framework: {reason}" if reason else "an older version wrote it; compile the model again"
            raise UsageError(f"{folder} has no {evidence.DECISIONS}: {why}")
        manifests[str(folder)] = installed.manifest
        searches.append(worth.search_of(str(folder), installed.records, found.decisions))
    worth.check_alike(manifests)
    document = worth.document_of(searches)
    _print(options, {"model": installed.manifest.model.name, "target": installed.manifest.target.name, **document}, worth.text_of(document))
    return 0


def plugins_command(options: argparse.Namespace) -> int:
    """List plugins and failures."""
    catalog = load_catalog(strict=False)
    _print(options, report.plugins_document(catalog), report.plugins_text(catalog))
    return 0


def doctor_command(options: argparse.Namespace) -> int:
    """Say what this machine can do."""
    catalog, wrong = load_catalog(strict=False), ""
    try:
        catalog, _ = settings.configured(catalog, arguments.resolved({}, catalog)[0].config)  # a backend may need what is set for it
    except UsageError as exc:
        wrong = str(exc)
    facts = report.doctor_facts(catalog, wrong)
    _print(options, {"checks": facts}, report.doctor_text(facts))
    return 0 if all(f["ok"] or not f["required"] for f in facts) else 1


def config_command(options: argparse.Namespace) -> int:
    """Print what is configured, or which files say so."""
    catalog = load_catalog(strict=False)
    effective, notes = arguments.resolved({}, catalog)
    for note in notes:
        print(visible(f"note: {note}"), file=sys.stderr)
    if options.path:
        _print(options, {"files": report.files_document(effective)}, report.files_text(effective))
    else:
        _print(options, {"values": report.config_document(effective, catalog), "files": report.files_document(effective),
                         "notes": list(notes)}, report.config_text(effective, catalog))
    return 0


def completion_command(options: argparse.Namespace) -> int:
    """Print a completion script."""
    try:
        import shtab
    except ImportError as exc:
        raise UsageError("shell completion needs the package shtab, which is not installed; "
                         "pip install 'agentcompile-core[completion]'") from exc
    script = shtab.complete(parser(), shell=options.shell)
    _print(options, {"shell": options.shell, "script": script}, script)
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "compile": compile_command, "generate": generate_command, "bench": bench_command,
    "trace": trace_command, "explain": explain_command, "audit": audit_command, "advice": advice_command, "cache": cache_command,
    "plugins": plugins_command, "doctor": doctor_command,
    "config": config_command, "completion": completion_command,
}
