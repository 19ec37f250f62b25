"""Advice from a recorded file: what tests use, what makes a run reproducible, and how air-gapped machines get LLM advice."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from agentcompile_core.plugin_api import Advice, Advisor, Question, UsageError, hookimpl, question_key, read_answer, serial

ENVIRONMENT = "AGENTCOMPILE_REPLAY"


class ReplayAdvisor(Advisor):
    """Looks answers up by question_key in a JSON file ``{"schema": 1, "answers": {key: answer}}``.

    The file is named by the environment variable AGENTCOMPILE_REPLAY or given to the constructor. A question without
    an answer gets empty advice, which leaves the heuristic order.
    """

    name = "replay"

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def advise(self, question: Question) -> Advice:
        """The recorded answer to ``question``, or empty advice.

        Raises:
            UsageError: no file is named, or it cannot be read.
        """
        answer = _answers(self._file()).get(question_key(question))
        return Advice() if answer is None else read_answer(json.dumps(answer), question.space, question.labels)

    def _file(self) -> Path:
        named = os.environ.get(ENVIRONMENT, "")
        if self._path is None and not named:
            raise UsageError(f"the replay advisor needs a file of recorded answers; name it in {ENVIRONMENT}")
        return self._path or Path(named)


def _answers(path: Path) -> dict[str, object]:
    try:
        data = serial.parse(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise UsageError(f"cannot read recorded advice from {path}: {exc.strerror}; name another in {ENVIRONMENT}") from exc
    except (UnicodeDecodeError, UsageError) as exc:
        raise UsageError(f"{path} is not a file of recorded advice: {exc}") from exc
    if type(data) is not dict or data.get("schema") != serial.SCHEMA or type(data.get("answers")) is not dict:
        raise UsageError(f"{path} is not a file of recorded advice (expected an object with schema {serial.SCHEMA} and answers)")
    return data["answers"]


@hookimpl
def agentcompile_advisors() -> Iterable[Advisor]:
    """Offer ``replay``."""
    return (ReplayAdvisor(),)
