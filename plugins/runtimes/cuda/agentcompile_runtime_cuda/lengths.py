"""The framework's own model at lengths that are new each time: without the library that prepares itself for each of them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_blocks = 0  # that somebody is in
_asked = True  # whether SDPA asked cuDNN before the first of them


@contextmanager
def any_length() -> Iterator[None]:
    """A block in which SDPA does not ask cuDNN, where it may ask anything else.

    torch asks it first on GPUs of compute capability 9.0 and 10.0, and it prepares itself for each number of keys that a thread has not
    seen (docs/decisions/0059), at every token of transformers' loop. The setting is the process's. Blocks may overlap in several threads:
    the last one to end puts back what the first one found.
    """
    global _blocks, _asked
    from torch.backends import cuda

    with _lock:
        if not _blocks:
            _asked = cuda.cudnn_sdp_enabled()
        _blocks += 1
        if any(enabled() for enabled in (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)):
            cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks:
                cuda.enable_cudnn_sdp(_asked)
