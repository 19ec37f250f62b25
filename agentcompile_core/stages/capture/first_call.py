"""The calls of a module before it is traced, and whether later results depend on what these were given.

Whether it remembers is asked in forks of this process (``forked_calls``), before any call here. A module that does is as it was, and runs
itself. Of others the first call is made here, so that what is set up once (a late import that registers itself, an operator that it
defines) is set up, and the graph is captured from there. Where forks do not tell, what code keeps is looked at instead: of modules whose
first call fills something there the same call is made from the state before, alone and behind another one. Either way, memory that a
call computes and that outlives it, in no place that can be looked at, is a reason to refuse (``outliving``): somebody may read it there.

Of language models those are called that have code which no installed package brought; of others nothing is.
"""

import threading
import time
from types import FunctionType
from typing import Any

import torch
from attrs import define
from torch import nn

from ...plugin.interfaces import LoadedModel
from ...runtime.device import forked_rng
from ...runtime.installed_packages import is_installed, is_own_module
from .code_state import CodeState, state_of_code
from .comparison import Arguments, given_to, has_data
from .dependence import REMEMBERS, answer, is_another_behind, is_in_training, training_matters
from .describe import text_config
from .evaluating import evaluating
from .forked_calls import lie_on_the_processor, remembers, told
from .left_behind import Noted
from .libraries import is_library_file
from .object_digest import Digests
from .outliving import Outliving

KEEPS = ("its forward keeps what it computes from its arguments where nothing that can be looked at leads to, and later calls may depend "
         "on that; build it anew, since it keeps what its example inputs gave")
LEAVES = ("its forward leaves what it computes from its arguments where nothing that can be looked at leads to, and its graph would not; "
          "it has left there what its example inputs gave")
LOOK_S = 0.02  # between two looks at what other threads may write to
TOKENS = 8


@define
class FirstCall:
    """The calls of a module before its trace, none of them made yet."""

    _loaded: LoadedModel
    _given: tuple[Arguments, ...]  # what it is asked with; empty: it is not to be called
    _computed: Outliving
    _state: CodeState | None  # what its code keeps; None: that is too much to be noted
    _asked: bool = False
    _remembers: bool | None = None  # None: not asked yet, or forks do not tell

    def in_training(self) -> str:
        """``dependence.training_matters``, or one clause on how a module in training mode remembers. Of no other one anything is called."""
        if not is_in_training(self._loaded):
            return ""
        if self._ask():
            return REMEMBERS
        if self._remembers is False and lie_on_the_processor(self._loaded.module, self._given[0]):
            why = told(lambda: training_matters(self._loaded))  # it is called in training mode there alone
            if why is not None:
                return why
        with self._computed:
            why = training_matters(self._loaded)
        return f"{why}; {KEEPS}" if why and self._remembers is None and self._computed.is_kept() else why

    def __call__(self) -> str:
        """Make it; one clause on how the module remembers. Empty: it does not, or nobody can know."""
        if not self._given:
            return ""
        if self._ask():
            return REMEMBERS
        return _first_call(self._loaded.module, self._given[0], self._state, self._computed, is_known=self._remembers is not None)

    def _ask(self) -> bool:
        if not self._asked:
            found = [remembers(self._loaded.module, given) for given in self._given]
            self._asked, self._remembers = True, any(found) or (None if None in found else False)
        return bool(self._remembers)


def begun(loaded: LoadedModel, walk: Digests) -> FirstCall:
    """The first call of ``loaded``. What its code keeps is noted now, by a ``walk`` that looked at it just now."""
    given = _example(loaded, walk)
    return FirstCall(loaded, given, Outliving(given[0] if given else ((), {})), state_of_code(loaded.module, walk) if given else None)


def _example(loaded: LoadedModel, walk: Digests) -> tuple[Arguments, ...]:
    """The example inputs of a plain module; of a language model a prompt and one token, as its programs are given."""
    if not has_data(loaded):
        return ()
    if hasattr(loaded, "example_inputs"):
        return (given_to(loaded),)
    vocabulary = getattr(text_config(loaded.module), "vocab_size", None)
    if not isinstance(vocabulary, int) or not any(map(_is_own_code, walk.met())):
        return ()
    device = next((t.device for t in loaded.module.parameters()), torch.device("cpu"))
    prompt = torch.arange(1, 1 + TOKENS, device=device)[None] % vocabulary
    return ((), {"input_ids": prompt}), ((), {"input_ids": prompt[:, :1]})


def _is_own_code(value: Any) -> bool:
    """Whether it is a function that no installed package brought."""
    if type(value) is not FunctionType:
        return False
    path = value.__code__.co_filename
    if path.startswith("<"):  # made at run time
        return is_own_module(value.__globals__.get("__name__"))
    return not is_installed(path) and not is_library_file(path)


def _first_call(module: nn.Module, given: Arguments, state: CodeState | None, computed: Outliving, is_known: bool) -> str:
    """``is_known``: that it does not remember."""
    with torch.no_grad(), evaluating(module), forked_rng({t.device for t in module.parameters()}):
        before = Noted(module)
        try:
            with computed:
                answer(module, given)
        except BaseException as exc:  # whoever captures it says why
            before.put_back()
            if state is not None:
                state.put_back_for_good()
            if isinstance(exc, Exception):
                return ""
            raise
        leaves = LEAVES if is_known else KEEPS
        if state is None or not state.changed():
            before.put_back()
            return leaves if computed.is_kept() else ""
        after, code = Noted(module), state.again()
        if _is_at_work(code):
            return ""
        before.put_back()
        if not state.changed():  # but for what attributes lead to
            del after, code  # which hold what the call left
            return leaves if computed.is_kept() else ""
        kept = before if not state.changed(but_caches=True) else after
        try:
            why = _why(module, given, before, state) if not is_known else told(lambda: _leaves(module, given, code)) or ""
            if why == REMEMBERS:
                before.put_back()
                if state.put_back_for_good():
                    return why
                why = f"{REMEMBERS}; build it anew, since a cache that was not empty holds what its example inputs gave"
        except BaseException:  # somebody stopped it
            code.put_back_for_good()
            kept.put_back()
            raise
        code.put_back_for_good()
        kept.put_back()
        return why


def _leaves(module: nn.Module, given: Arguments, code: CodeState) -> str:
    """``LEAVES`` where a call leaves what it computes beside the places that ``code`` knows; to be asked in a fork."""
    computed, before = Outliving(given), Noted(module)
    with computed:
        answer(module, given)
    before.put_back()
    code.put_back_for_good()
    return LEAVES if computed.is_kept() else ""


def _is_at_work(code: CodeState) -> bool:
    """Whether another thread writes to what was just noted; of such things nobody takes back anything."""
    if threading.active_count() == 1:
        return False
    time.sleep(LOOK_S)
    return code.changed()


def _why(module: nn.Module, given: Arguments, before: Noted, state: CodeState) -> str:
    if filled := state.beyond_return():
        return f"its forward fills a {filled}, which cannot be emptied again to see what depends on it"
    return REMEMBERS if _remembers(module, given, before, state) else ""


def _remembers(module: nn.Module, given: Arguments, before: Noted, state: CodeState) -> bool:
    """Whether a call from the state before has another result behind another call; False, too, where it cannot be made from there: what is
    set up once cannot be set up again."""
    def last_of(*calls: Arguments) -> list[Any]:
        before.put_back()
        state.put_back()
        return [answer(module, one) for one in calls][-1]

    return is_another_behind(given, last_of)
