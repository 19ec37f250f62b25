"""torch's settings of the program around us, which a capture knew nothing of: they have no say in what a session computes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from .device import HOSTS


@contextmanager
def as_captured() -> Iterator[None]:
    """A block without autocast, in which a new tensor lies on the host unless it says otherwise; the caller's settings hold behind it.

    Programs were made for values of fixed types at fixed places. It costs a few lookups where nothing is set.
    """
    import torch

    host = HOSTS[0]
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    with ExitStack() as stack:
        for kind in (host, found.type) if found is not None else (host,):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != host:
            stack.enter_context(torch.device(host))
        yield
