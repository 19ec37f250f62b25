"""The child's side of a peer: one answer per line of standard input, as JSON; whatever libraries print goes to the error output."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

Message = dict[str, Any]


def serve(start: Callable[[], tuple[Message, Callable[[Message], Message]]]) -> int:
    """Start, say the facts, then answer until the input ends. A failure is the last answer: ``{"error": one line}``; returns the exit code.

    ``start`` returns the facts (``versions`` and what else a row should carry) and what answers one request.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        facts, answer = start()
        _say(answers, facts)
        for line in sys.stdin:
            _say(answers, answer(json.loads(line)))
    except Exception as exc:  # whatever a peer does: its parent says it in a row
        traceback.print_exc()
        _say(answers, {"error": f"{type(exc).__name__}: {' '.join(str(exc).split())[:300]}"})
        return 1
    return 0


def _say(answers: TextIO, message: Message) -> None:
    print(json.dumps(message), file=answers, flush=True)
