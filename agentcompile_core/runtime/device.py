"""torch's devices without their names: random state, memory and waiting, for whatever the framework runs on. The CPU is one of them."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..plugin.interfaces import Backend

log = logging.getLogger("agentcompile.runtime")
_told: set[str] = set()  # backends whose blocks raised
HOSTS = ("cpu", "meta")  # without random state, streams and memory of their own


def forked_rng(devices: "Iterable[torch.device | str]", enabled: bool = True) -> AbstractContextManager[None]:
    """A block that leaves torch's random state of the host and of ``devices`` (of one type, besides hosts) as it was."""
    import torch

    own = [d for d in map(torch.device, devices) if d.type not in HOSTS]
    indices = sorted({torch.accelerator.current_device_index() if d.index is None else d.index for d in own})
    return torch.random.fork_rng(devices=indices, enabled=enabled, device_type=own[0].type if own else "cpu")


def random_state(device: "torch.device | str") -> "torch.Tensor":
    """torch's random state of ``device``, as ``set_random_state`` takes it."""
    import torch

    where = torch.device(device)
    state: torch.Tensor = torch.get_rng_state() if where.type in HOSTS else torch.get_device_module(where).get_rng_state(where)
    return state


def set_random_state(device: "torch.device | str", state: "torch.Tensor") -> None:
    """Go on with the random numbers that follow ``state``."""
    import torch

    where = torch.device(device)
    if where.type in HOSTS:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(where).set_rng_state(state, where)


def release_cache() -> None:
    """Give memory that torch holds and nothing uses back to the accelerator, where there is one."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def free_bytes(device: "torch.device") -> int | None:
    """Bytes that are free on ``device``; None for the host, and where the device's module of torch cannot say."""
    import torch

    if device.type in HOSTS:
        return None
    ask: Any = getattr(torch.get_device_module(device), "mem_get_info", None)
    return int(ask(device)[0]) if ask is not None else None


@contextmanager
def at_any_length(backend: "Backend | None", tried: "Callable[[Callable[[], object]], object] | None" = None) -> Iterator[None]:
    """A block around the framework's own model at lengths that are new each time (``Backend.any_length``); None: on no backend's device.

    What the backend raises there costs speed alone: the block runs as it would without. ``tried`` calls, and keeps what is raised; None:
    it is logged, as a warning once for each backend.
    """
    block = ExitStack()
    if backend is None:
        yield
        return
    tried = tried or partial(_logged, backend.name)
    tried(lambda: block.enter_context(backend.any_length()))
    try:
        yield
    finally:
        tried(block.close)


def _logged(name: str, call: "Callable[[], object]") -> None:
    try:
        call()
    except Exception as exc:  # whatever a plugin raises
        level = logging.DEBUG if name in _told else logging.WARNING
        log.log(level, "any_length() of backend %r raises %s: %s", name, type(exc).__name__, exc)
        _told.add(name)


def described() -> str:
    """Type, name and memory of the accelerator that torch would use; empty where there is none."""
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        return ""
    ask: Any = getattr(torch.get_device_module(found), "get_device_properties", None)
    facts = ask(torch.accelerator.current_device_index()) if ask is not None else None
    name, memory_bytes = getattr(facts, "name", ""), int(getattr(facts, "total_memory", 0))
    return ", ".join(word for word in (found.type, name, f"{memory_bytes >> 30} GiB" if memory_bytes else "") if word)
