"""What the first call of a plain module fills where no attribute leads to, and whether later results depend on what that call was given.

Most fill nothing there. Of those that do the same call is made from the state before, alone and behind another one. Where these differ, the
module remembers: it is as it was before, and runs itself. Else it is left as one call with its example inputs leaves it, so that what is
set up once (a late import that registers itself, an operator that it defines) is set up, and its graph is captured from there.
"""

import threading
import time
from typing import Any

import torch
from attrs import frozen

from ...plugin.interfaces import LoadedModel
from ...runtime.device import forked_rng
from .code_state import CodeState, state_of_code
from .comparison import Arguments, given_to, has_data
from .dependence import REMEMBERS, answer, is_another_behind
from .evaluating import evaluating
from .left_behind import Noted
from .object_digest import Digests
from .outliving import Outliving

KEEPS = ("its forward keeps what it computes from its arguments where nothing that can be looked at leads to, and later calls may depend "
         "on that; build it anew, since it keeps what its example inputs gave")
LOOK_S = 0.02  # between two looks at what other threads may write to


@frozen
class FirstCall:
    """The first call, to be made. ``computed`` is to be entered around every call that is made before."""

    loaded: LoadedModel
    computed: Outliving
    _state: CodeState | None

    def __call__(self) -> str:
        """Make it; one clause on how the module remembers. Empty: it does not, or nobody can know."""
        return _first_call(self.loaded, self._state, self.computed) if self._state is not None else ""


def begun(loaded: LoadedModel, walk: Digests) -> FirstCall:
    """The first call of ``loaded``. What its code keeps is noted now, by a ``walk`` that looked at it just now."""
    if not hasattr(loaded, "example_inputs") or not has_data(loaded):
        return FirstCall(loaded, Outliving(((), {})), None)
    return FirstCall(loaded, Outliving(given_to(loaded)), state_of_code(loaded.module, walk))


def _first_call(loaded: LoadedModel, state: CodeState, computed: Outliving) -> str:
    module, given = loaded.module, given_to(loaded)
    with torch.no_grad(), evaluating(module), forked_rng({t.device for t in module.parameters()}):
        before = Noted(module)
        try:
            with computed:
                answer(module, given)
        except BaseException as exc:  # whoever captures it says why
            before.put_back()
            state.put_back_for_good()
            if isinstance(exc, Exception):
                return ""
            raise
        if not state.changed():
            before.put_back()
            return KEEPS if computed.is_kept() else ""
        after, code = Noted(module), state.again()
        if _is_at_work(code):
            return ""
        before.put_back()
        if not state.changed():  # but for what attributes lead to
            return ""
        kept = before if not state.changed(but_caches=True) else after
        try:
            why = _why(loaded, before, state)
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


def _is_at_work(code: CodeState) -> bool:
    """Whether another thread writes to what was just noted; of such things nobody takes back anything."""
    if threading.active_count() == 1:
        return False
    time.sleep(LOOK_S)
    return code.changed()


def _why(loaded: LoadedModel, before: Noted, state: CodeState) -> str:
    if filled := state.beyond_return():
        return f"its forward fills a {filled}, which cannot be emptied again to see what depends on it"
    return REMEMBERS if _remembers(loaded, before, state) else ""


def _remembers(loaded: LoadedModel, before: Noted, state: CodeState) -> bool:
    """Whether a call from the state before has another result behind another call; False, too, where it cannot be made from there: what is
    set up once cannot be set up again."""
    def last_of(*calls: Arguments) -> list[Any]:
        before.put_back()
        state.put_back()
        return [answer(loaded.module, one) for one in calls][-1]

    return is_another_behind(given_to(loaded), last_of)
