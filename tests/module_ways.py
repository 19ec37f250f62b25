"""The ways in which a module's session runs calls, without a device: a recording that runs again stands for a captured graph."""

from collections.abc import Callable
from typing import Any

from agentcompile_core.plugin_api import Reject
from agentcompile_core.runtime.module_session import ModuleSession

WAYS = ("launched", "replayed", "by itself")


def recording(session: ModuleSession, *, broken: bool = False) -> Callable[..., Callable[[], None]]:
    """``capture`` for the session: as a graph does, it reads and writes the memory of the recording. ``broken``: it does nothing."""
    moving = session._moving

    def capture(run: Callable[[], None], *, warm_ups: int = 0, runs: int = 1) -> Callable[[], None]:
        for _ in range(warm_ups + runs):
            run()
        then = dict(moving._environment)
        places = {name: then[name] for name in moving._names}

        def replay() -> None:
            if broken:
                return
            moving.to(places)
            run()
            for name, tensor in then.items():
                now = moving._environment.get(name, tensor)
                if now.data_ptr() != tensor.data_ptr():
                    tensor.copy_(now)
            moving.forget()

        return replay

    return capture


def put(session: Any, module: Any, way: str, capture: Any = None) -> None:
    """Have the session run calls in ``way``; ``capture``: of the device, where there is one."""
    assert isinstance(session, ModuleSession)
    session.launch()
    session.stay()
    answer = None
    if way == "replayed":
        answer = session.replay(capture or recording(session))
    elif way == "by itself":
        answer = session.step_aside(module)
    assert not isinstance(answer, Reject), answer
