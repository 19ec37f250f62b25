"""The command line: compile, generate, bench, trace, explain, audit, cache, plugins, doctor, config, completion.

Exit codes: 0 done, 1 failed, 2 asked wrongly.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from ..errors import AgentCompileError, UsageError, one_line, visible
from .parser import parser as _parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from . import commands, interrupt

    options.stdout = sys.stdout  # of documents: what a plugin or a model's code prints meanwhile is none
    try:
        with interrupt.in_order(), redirect_stdout(sys.stderr if options.json else sys.stdout):
            return commands.COMMANDS[options.command](options)
    except UsageError as exc:
        return _refuse(options, str(exc), 2)
    except AgentCompileError as exc:
        return _refuse(options, str(exc), 1)
    except RuntimeError as exc:
        if type(exc).__name__ != "OutOfMemoryError":  # torch's, without importing it here
            return _defect(options, exc)
        return _refuse(options, "the GPU has too little free memory for this model and context; use a smaller --context, or free some", 1)
    except KeyboardInterrupt:
        return _refuse(options, interrupt.what_is_kept(options, getattr(options, "progress", None)), 130)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as exc:
        return _defect(options, exc)


def _defect(options: argparse.Namespace, exc: Exception) -> int:
    """What nobody expected, as one sentence; strict runs and developers get all of it."""
    if os.environ.get("AGENTCOMPILE_STRICT", "") not in ("", "0"):
        raise exc
    said = one_line(f"{type(exc).__name__}: {exc}", 400)
    return _refuse(options, f"{options.command} failed in a way that nobody expected, which is a defect of this program or of a plugin "
                            f"({said}); run it again with AGENTCOMPILE_STRICT=1 to see where, and report that", 1)


def _refuse(options: argparse.Namespace, message: str, code: int) -> int:
    if options.json:
        print(json.dumps({"error": message, "exit_code": code}), file=options.stdout)
    print(visible(f"agentcompile: {message}"), file=sys.stderr)
    return code
