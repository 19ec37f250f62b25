"""Advice from an LLM through litellm: one request per question, a JSON schema, a strict reader. Never code, never a decision."""

import atexit
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from agentcompile_core.plugin_api import (
    Advice,
    Advisor,
    Question,
    UsageError,
    answer_schema,
    holds_secret,
    hookimpl,
    question_json,
    question_key,
    read_answer,
    serial,
)

from .asking import Asker, NoAnswer

MODEL = "AGENTCOMPILE_LLM"
API_BASE = "AGENTCOMPILE_LLM_API_BASE"
RECORD = "AGENTCOMPILE_RECORD_ADVICE"
TIMEOUT_S = 60.0
MAX_TOKENS = 4096

INSTRUCTIONS = """You advise a CUDA kernel compiler. You are given facts about one region of a model's graph and a closed space of
implementations and schedule parameters. Say which implementations, covers and parameter values are likely fastest on the
target for single-token decode, where the weights are read once and memory bandwidth is the limit. Use only names and
values that occur in the question. Name risks that deserve extra validation. In later rounds the evidence holds measured
times in microseconds beside the memory floor: say what limits the slow ones. Answer with one JSON object of the schema."""


@frozen(kw_only=True)
class Settings:
    """Where to ask. Keys come from the provider's own environment variables and are never read here."""

    model: str
    api_base: str | None = None
    timeout_s: float = TIMEOUT_S

    @classmethod
    def from_environment(cls) -> "Settings":
        """Settings from AGENTCOMPILE_LLM and AGENTCOMPILE_LLM_API_BASE.

        Raises:
            UsageError: no model is named.
        """
        model = os.environ.get(MODEL, "")
        if not model:
            example = f"{MODEL}=openai/gpt-4o-mini"
            raise UsageError(f"the litellm advisor needs a model: set {MODEL}, for example {example}, and the provider's key")
        return cls(model=model, api_base=os.environ.get(API_BASE) or None)


class LiteLLMAdvisor(Advisor):
    """Asks the model named by AGENTCOMPILE_LLM; see Settings."""

    name = "litellm"

    def __init__(self, settings: Settings | None = None, record: Path | None = None) -> None:
        self._settings, self._record = settings, record

    def advise(self, question: Question) -> Advice:
        """Ask once, read strictly.

        Raises:
            UsageError: no model is configured, litellm is not installed, the provider failed or did not answer in time,
                the answer is no JSON object, or the file for recorded answers cannot be used. Never holds a provider's
                text or a key.
        """
        settings = self._settings or Settings.from_environment()
        path = self._record or (Path(os.environ[RECORD]) if os.environ.get(RECORD) else None)
        recorded = _recorded(path) if path is not None else {}
        text, tokens = ask(question, settings)
        if _tells_a_secret(text):
            raise UsageError(f"the answer of {settings.model} repeats a key of this environment and was dropped; do not trust that server")
        advice = evolve(read_answer(text, question.space, question.labels), tokens=tokens)
        if path is not None:
            _write(path, {**recorded, question_key(question): json.loads(text)})
        return advice


def _tells_a_secret(text: str) -> bool:
    """Whether a key stands in an answer, as it is or behind the escapes of JSON."""
    try:
        plain = json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        plain = ""
    return holds_secret(text) or holds_secret(plain)


def ask(question: Question, settings: Settings) -> tuple[str, int]:
    """One request within the deadline; the text of the answer and the tokens that it cost. Raises UsageError."""
    deadline_s = min(settings.timeout_s, max(1.0, question.budget_s)) if question.budget_s else settings.timeout_s
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": serial.dumps(question_json(question))}]
    schema = {"type": "json_schema", "json_schema": {"name": "advice", "strict": False, "schema": answer_schema(question.labels)}}
    arguments = {"model": settings.model, "api_base": settings.api_base, "messages": messages, "response_format": schema,
                 "temperature": 0, "max_tokens": MAX_TOKENS, "timeout": deadline_s, "num_retries": 0, "max_retries": 0,
                 "drop_params": True}
    try:
        return _asker().ask(arguments, deadline_s)
    except NoAnswer as exc:
        why = str(exc)
    raise UsageError(f"no advice from {settings.model}: {why}; check the model's name, its key and the server")


@cache
def _asker() -> Asker:
    asker = Asker()
    atexit.register(asker.close)
    return asker


def _recorded(path: Path) -> dict[str, Any]:
    """The answers that ``path`` holds already; read before anything is asked, so that no paid answer is lost."""
    if not path.exists():
        return {}
    try:
        data = serial.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, UsageError) as exc:
        raise UsageError(f"cannot add advice to {path} ({exc}); name another file in {RECORD}") from exc
    if type(data) is not dict or data.get("schema") != serial.SCHEMA or type(data.get("answers")) is not dict:
        raise UsageError(f"{path} is not a file of recorded advice; name another file in {RECORD}")
    answers: dict[str, Any] = data["answers"]
    return answers


def _write(path: Path, answers: dict[str, Any]) -> None:
    """Written aside and renamed, so that the replay advisor never reads half a file."""
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.write_text(json.dumps({"schema": serial.SCHEMA, "answers": answers}, indent=1, sort_keys=True), encoding="utf-8")
        temporary.replace(path)
    except OSError as exc:
        raise UsageError(f"cannot write recorded advice to {path}: {exc.strerror}; name another file in {RECORD}") from exc


@hookimpl
def agentcompile_advisors() -> Iterable[Advisor]:
    """Offer ``litellm``."""
    return (LiteLLMAdvisor(),)
