"""Asking an advisor from a distance: a copy of the question, a deadline, and nothing that it raises, keeps or does later comes back.

An advisor is Python in this process, so it cannot be killed: it runs in a thread that is abandoned at the deadline. An exception is
then put into that thread, which ends loops in Python; one that waits in foreign code is left waiting, and is not asked again before
it returns. Advisors that need more (a service) keep a child process of their own, as the litellm one does.
"""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

from attrs import evolve

from ...errors import ContractError, bounded
from ...garbage import uncollected
from ...ir.advice import Advice, Question, RejectedItem
from ...plugin import thread_exceptions
from ...plugin.interfaces import Advisor
from ...plugin.secrets import scrubbed
from .advice_check import MAX_ITEMS, screen

GRACE_S = 1.0  # beyond the budget of the question, which an advisor keeps by itself
Screened = tuple[Advice, tuple[RejectedItem, ...], int]
_busy: dict[int, threading.Thread] = {}  # by id of an advisor: who has not come back from an earlier question


class Late(Exception):
    """No answer within the deadline."""


class Raised(Exception):
    """The advisor raised; the cause is what it raised."""


def ask(advisor: Advisor, question: Question) -> Screened:
    """The checked answer: what is accepted, what was refused, and the tokens that it cost.

    Raises:
        Late: there was none within the question's budget.
        Raised: the advisor (or reading its answer) raised something, of any class.
    """
    earlier = _busy.pop(id(advisor), None)
    if earlier is not None and earlier.is_alive():
        _busy[id(advisor)] = earlier
        raise Late(f"advisor {advisor.name} still has not answered an earlier question")
    asked = _copied(question)
    worker, found = _started(lambda: _answer(advisor, asked, question))
    deadline_s = question.budget_s + GRACE_S
    worker.join(deadline_s)
    if worker.is_alive():
        _busy[id(advisor)] = worker
        thread_exceptions.put(worker, SystemExit)
        raise Late(f"advisor {advisor.name} did not answer within {deadline_s:.3g} s; it is not waited for")
    (kind, value), *_ = found
    if kind == "raised":
        raise Raised from value
    answer: Screened = value
    return answer


def _copied(question: Question) -> Question:
    """By pickle, which takes a quarter of the time of ``deepcopy``; values of plugins' own classes may have no name that it finds."""
    with uncollected():
        try:
            copied: Question = pickle.loads(pickle.dumps(question))  # noqa: S301  what this process has just written
            return copied
        except Exception:
            return copy.deepcopy(question)


def _started(call: Callable[[], Screened]) -> tuple[threading.Thread, list[tuple[str, Any]]]:
    found: list[tuple[str, Any]] = []

    def run() -> None:
        try:
            found.append(("answer", call()))
        except BaseException as exc:  # KeyboardInterrupt and SystemExit of a plugin are its failures, not the user's wish
            found.append(("raised", exc))

    worker = threading.Thread(target=run, name="advisor", daemon=True)
    worker.start()
    return worker, found


def _answer(advisor: Advisor, asked: Question, question: Question) -> Screened:
    answer = advisor.advise(asked)
    if not isinstance(answer, Advice):
        raise ContractError(f"advisor {advisor.name} returned {type(answer).__name__}, not Advice")
    said: Any = answer.refused if isinstance(answer.refused, tuple | list) else ()
    given = tuple(item for item in said[:MAX_ITEMS] if type(item) is RejectedItem and type(item.rule) is str)
    accepted, rejected = screen(evolve(answer, refused=given), question)
    rejected = tuple(RejectedItem(item=scrubbed(str(item.item)), rule=scrubbed(item.rule)[:8]) for item in rejected)
    return accepted, rejected, answer.tokens if type(answer.tokens) is int and answer.tokens >= 0 else 0


def described(exc: BaseException) -> str:
    """One line on what an advisor raised, without secrets; an exception may fail to say what it is."""
    try:
        text = f"{type(exc).__name__}: {exc}"
    except BaseException:
        text = type(exc).__name__
    return bounded(scrubbed(text))
