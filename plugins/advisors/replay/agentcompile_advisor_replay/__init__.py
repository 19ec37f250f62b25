"""Advice from a recorded file: what tests use, what makes a run reproducible, and how air-gapped machines get LLM advice."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from attrs import field, frozen

from agentcompile_core.plugin_api import Advice, Advisor, Question, UsageError, hookimpl, question_key, read_answer, serial

ENVIRONMENT = "AGENTCOMPILE_REPLAY"


@frozen(kw_only=True)
class Settings:
    """``[plugin.replay]``."""

    file: Path | None = field(default=None, metadata={"variable": ENVIRONMENT, "doc": "file of recorded answers"})


class ReplayAdvisor(Advisor):
    """Looks answers up by question_key in a JSON file ``{"schema": 1, "answers": {key: answer}}``.

    The file is named by the setting ``file``, else by the environment variable AGENTCOMPILE_REPLAY. A question without an
    answer gets empty advice, which leaves the heuristic order.
    """

    name = "replay"
    settings_class = Settings

    def __init__(self, settings: Settings | None = None) -> None:
        if settings is not None:
            self.configure(settings)

    def advise(self, question: Question) -> Advice:
        """The recorded answer to ``question``, or empty advice.

        Raises:
            UsageError: no file is named, or it cannot be read.
        """
        answer = _answers(self._file()).get(question_key(question))
        return Advice() if answer is None else read_answer(json.dumps(answer), question.space, question.labels)

    def _file(self) -> Path:
        named = os.environ.get(ENVIRONMENT, "")
        if self.settings.file is None and not named:
            raise UsageError("the replay advisor needs a file of recorded answers; name it as file in [plugin.replay] of "
                             f"agentcompile.toml, or in {ENVIRONMENT}")
        return self.settings.file or Path(named).expanduser()


def _answers(path: Path) -> dict[str, object]:
    try:
        data = serial.parse(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise UsageError(f"cannot read recorded advice from {path}: {exc.strerror}; name another one") from exc
    except (UnicodeDecodeError, UsageError) as exc:
        raise UsageError(f"{path} is not a file of recorded advice: {exc}") from exc
    if type(data) is not dict or data.get("schema") != serial.SCHEMA or type(data.get("answers")) is not dict:
        raise UsageError(f"{path} is not a file of recorded advice (expected an object with schema {serial.SCHEMA} and answers)")
    return data["answers"]


@hookimpl
def agentcompile_advisors() -> Iterable[Advisor]:
    """Offer ``replay``."""
    return (ReplayAdvisor(),)
