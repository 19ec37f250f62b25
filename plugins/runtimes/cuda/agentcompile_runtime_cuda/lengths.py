"""The framework's own model at lengths that are new each time: without the library that prepares itself for each of them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside: list[bool] = []  # for each block that somebody is in: whether cuDNN was asked before the first of them


@contextmanager
def any_length() -> Iterator[None]:
    """A block in which SDPA does not ask cuDNN. torch asks it first on GPUs of compute capability 9.0 and 10.0, and it prepares itself for
    each number of keys that a thread has not seen: 47 ms on an H200's host, at every token of transformers' loop.

    The setting is the process's. Blocks may overlap in several threads: the last one to end puts back what the first one found.
    """
    import torch

    with _lock:
        _inside.append(_inside[0] if _inside else torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _lock:
            before = _inside.pop()
            if not _inside:
                torch.backends.cuda.enable_cudnn_sdp(before)
