"""What parent and child say to each other: jobs, evaluations, and one JSON object per line.

Parent to child: ``{"id", "method", "params"}``. Child to parent: ``{"hello"}`` once it is ready; per request any number
of ``{"id", "phase"}`` (now working on it) and ``{"id", "kernel"}`` (built), then ``{"id", "result"}``. ``"lost": true``
beside a result says that the child's device context is broken and the child must be replaced.
"""

import os

from attrs import field, frozen

from ..errors import Cause
from ..ir.candidate import Kernel
from ..ir.plan import Step
from ..ir.record import Measurement
from ..ir.verdict import Trial, Verdict

# The child's whole environment: what torch, CUDA and compilers need. No credentials of any service.
PASSED = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "VIRTUAL_ENV",
    "PYTHONPATH", "PYTHONHASHSEED", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE", "XDG_CACHE_HOME", "CC", "CXX", "CUDA_HOME",
    "CUDA_PATH", "CUDA_ROOT", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING", "CUDA_CACHE_PATH",
    "CUDA_CACHE_DISABLE", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "TRITON_CACHE_DIR", "AGENTCOMPILE_PLUGINS", "AGENTCOMPILE_BLOCK_PLUGINS", "AGENTCOMPILE_CACHE_DIR",
)
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
CATALOG = "agentcompile_core.plugin.catalog:load_catalog"


def child_environment() -> dict[str, str]:
    """The variables that the child gets: those of ``PASSED`` that are set."""
    return {name: os.environ[name] for name in PASSED if name in os.environ and not any(word in name for word in _SECRET)}


@frozen(kw_only=True)
class Job:
    """One candidate to evaluate.

    ``validators`` are qualified names or short names; ``kernel`` saves the build. ``time`` asks for a measurement after
    a pass, ``baseline`` also for one of the framework on the same nodes. ``good_enough_us``: a candidate whose first
    few timings are far above it is not timed to the end.
    """

    trial: Trial
    step: Step
    backend: str
    validators: tuple[str, ...] = ("numerics",)
    kernel: Kernel | None = None
    time: bool = True
    baseline: bool = False
    good_enough_us: float = 0.0


@frozen(kw_only=True)
class Evaluation:
    """What became of a job. ``kernel`` is there if it was built; ``measurement`` only after a pass and only on a device."""

    kernel: Kernel | None = field(default=None, repr=False)
    verdicts: tuple[Verdict, ...] = ()
    measurement: Measurement | None = None
    baseline: Measurement | None = None
    failure: Cause | None = None
    message: str = ""
    seconds: float = 0.0
