"""What guarded children get of the environment: what torch, accelerators and compilers need, and no credentials of any service."""

import os
from collections.abc import Iterable

# The child's whole environment besides what backends name: what torch and compilers need. No credentials of any service.
PASSED = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "VIRTUAL_ENV",
    "PYTHONPATH", "PYTHONHASHSEED", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE", "XDG_CACHE_HOME", "CC", "CXX",
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE", "MKL_NUM_THREADS", "TRITON_CACHE_DIR",
    "AGENTCOMPILE_PLUGINS", "AGENTCOMPILE_BLOCK_PLUGINS", "AGENTCOMPILE_CACHE_DIR",
)
# Threads that wait give the core away: compilers, the parent and other workers run beside a child, and spinning took a third of it.
# torch asks for huge pages: operands and references are made anew for every case, and small pages of them took another third.
DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}

_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


def child_environment(more: Iterable[str] = ()) -> dict[str, str]:
    """The variables that the child gets: those of ``PASSED``, and ``more`` (what installed backends name), that are set; no secrets.

    Those of ``DEFAULTS`` are there in any case.
    """
    passed = (name for name in (*PASSED, *more) if not any(word in name for word in _SECRET))
    return DEFAULTS | {name: os.environ[name] for name in passed if name in os.environ}
