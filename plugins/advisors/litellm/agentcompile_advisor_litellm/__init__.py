"""Advice from an LLM through litellm: one request per question, a JSON schema, a strict reader. Never code, never a decision."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from agentcompile_core import serial
from agentcompile_core.advice import Advice, Question
from agentcompile_core.advice_json import answer_schema, question_json, question_key, read_answer
from agentcompile_core.errors import UsageError
from agentcompile_core.hookspecs import hookimpl
from agentcompile_core.interfaces import Advisor

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
            raise UsageError(f"the litellm advisor needs a model: set {MODEL}, for example {MODEL}=openai/gpt-4o-mini, and the provider's key")
        return cls(model=model, api_base=os.environ.get(API_BASE) or None)


def _litellm() -> Any:
    # Before the import: no price list from the network, no .env file that happens to lie around.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_MODE", "PRODUCTION")
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm


class LiteLLMAdvisor(Advisor):
    """Asks the model named by AGENTCOMPILE_LLM; see Settings."""

    name = "litellm"

    def __init__(self, settings: Settings | None = None, record: Path | None = None) -> None:
        self._settings, self._record = settings, record

    def advise(self, question: Question) -> Advice:
        """Ask once, read strictly.

        Raises:
            UsageError: no model is configured, the provider failed or did not answer in time, or the answer is no JSON object.
        """
        settings = self._settings or Settings.from_environment()
        text, tokens = self._ask(question, settings)
        advice = evolve(read_answer(text, question.space), tokens=tokens)
        record = self._record or (Path(os.environ[RECORD]) if os.environ.get(RECORD) else None)
        if record is not None:
            _append(record, question_key(question), json.loads(text))
        return advice

    def _ask(self, question: Question, settings: Settings) -> tuple[str, int]:
        litellm = _litellm()
        import openai

        deadline_s = min(settings.timeout_s, max(1.0, question.budget_s)) if question.budget_s else settings.timeout_s
        messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": serial.dumps(question_json(question))}]
        schema = {"type": "json_schema", "json_schema": {"name": "advice", "strict": False, "schema": answer_schema()}}
        try:
            response = litellm.completion(model=settings.model, api_base=settings.api_base, messages=messages, response_format=schema,
                                          temperature=0, max_tokens=MAX_TOKENS, timeout=deadline_s, num_retries=0, max_retries=0)
        except openai.APIError as exc:
            # The provider's text may hold the prompt or hints about the account: its class is enough.
            raise UsageError(f"no advice from {settings.model}: {type(exc).__name__}") from None
        usage = getattr(response, "usage", None)
        return response.choices[0].message.content or "", int(getattr(usage, "total_tokens", 0) or 0)


def _append(path: Path, key: str, answer: object) -> None:
    """Add one answer to a file that the replay advisor reads; written aside and renamed."""
    data = json.loads(path.read_text()) if path.exists() else {"schema": serial.SCHEMA, "answers": {}}
    data["answers"][key] = answer
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(data, indent=1, sort_keys=True))
    temporary.replace(path)


@hookimpl
def agentcompile_advisors() -> Iterable[Advisor]:
    """Offer ``litellm``."""
    return (LiteLLMAdvisor(),)
