"""``agentcompile cache``: look after what is kept between runs."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..api import arguments, setting_up
from ..errors import UsageError
from ..plugin.discovery import load_catalog
from ..store import Store, care, exchange


def cache_command(options: argparse.Namespace) -> int:
    """Show, verify, prune, export or import; 1 where ``verify`` finds damage."""
    if (options.file is not None) != (options.action in ("export", "import")):
        needs = "needs a file" if options.file is None else f"takes no file, and got {options.file!r}"
        raise UsageError(f"cache {options.action} {needs}; export and import name one: agentcompile cache export FILE")
    store = _store()
    found = _DONE[options.action](store, options)
    for warning in found.get("warnings", ()):
        print(f"warning: {warning}", file=sys.stderr)
    if options.json:
        print(json.dumps(found, indent=1, sort_keys=True), file=options.stdout)
    else:
        print(_SAID[options.action](found))
    return 1 if options.action == "verify" and (found["damaged"] or found["database"]) else 0


def _store() -> Store:
    effective, notes = arguments.resolved({}, load_catalog(strict=False))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return setting_up.store_of(effective.config)


def _shown(found: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found["entries"].items()))
    older = "".join(f"\n  of an older version: {folder}; agentcompile cache prune removes it" for folder in found["older"])
    return f"{found['folder']}\n  {found['bytes'] / 1e6:.1f} MB: {kinds}\n  schema {found['schema']} of the tuning database{older}"


def _verified(found: dict[str, Any]) -> str:
    lines = [f"{found['folder']}: {found['checked']} entries checked, {len(found['damaged'])} damaged"]
    lines += [f"  damaged: {name}" for name in found["damaged"]]
    lines += [f"  the tuning database: {found['database']}"] if found["database"] else []
    return "\n".join([*lines, *(["a damaged entry is a miss and never used; agentcompile cache prune removes it"] if lines[1:] else [])])


def _pruned(found: dict[str, Any]) -> str:
    return (f"{found['folder']}: removed {len(found['damaged'])} damaged entries, {found['left_over']} folders of killed runs, "
            f"{len(found['older'])} of older versions; {found['freed_bytes'] / 1e6:.1f} MB freed")


def _exported(found: dict[str, Any]) -> str:
    return f"{found['file']}: {', '.join(f'{count} {kind}' for kind, count in sorted(found['entries'].items()))}; kernels stay here"


def _imported(found: dict[str, Any]) -> str:
    refused = f", {found['refused']} of other kinds not taken" if found["refused"] else ""
    return (f"{found['file']}: {found['added']} entries added, {found['known']} known already{refused}; they hold for the same GPU, driver "
            "and versions only, and kernels are built here")


_DONE = {"show": lambda store, options: care.show(store), "verify": lambda store, options: care.verify(store),
         "prune": lambda store, options: care.prune(store), "export": lambda store, options: exchange.write(store, Path(options.file)),
         "import": lambda store, options: exchange.read(store, Path(options.file))}
_SAID = {"show": _shown, "verify": _verified, "prune": _pruned, "export": _exported, "import": _imported}
