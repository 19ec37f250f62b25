"""What parent and child say to each other: jobs, evaluations, and one JSON object per line.

Parent to child: ``{"settings"}`` first (of plugins: never a key), then ``{"id", "method", "params"}``. Child to parent:
``{"hello"}`` once it is ready; per request any number
of ``{"id", "phase"}`` (now working on it) and ``{"id", "kernel"}`` (built), then ``{"id", "result"}``. ``"lost": true``
beside a result says that the child's device context is broken and the child must be replaced.
"""


from attrs import field, frozen

from ..configuration import defaults
from ..errors import Cause
from ..ir.candidate import Kernel
from ..ir.plan import Step
from ..ir.record import Measurement
from ..ir.verdict import Trial, Verdict

CATALOG = "agentcompile_core.plugin.discovery:load_catalog"


@frozen(kw_only=True)
class Job:
    """One candidate to evaluate.

    ``validators`` are qualified names or short names; ``kernel`` saves the build. ``time`` asks for a measurement after
    a pass, ``baseline`` also for one of the framework on the same nodes. ``good_enough_us``: a candidate whose first
    few timings are far above it is not timed to the end. ``check_s``: seconds that the check may take; 0: as the backend says.
    """

    trial: Trial
    step: Step
    backend: str
    validators: tuple[str, ...] = defaults.VALIDATORS
    kernel: Kernel | None = None
    time: bool = True
    baseline: bool = False
    good_enough_us: float = 0.0
    check_s: float = 0.0


@frozen(kw_only=True)
class Evaluation:
    """What became of a job. ``measurement`` is there only after a pass and only on a device.

    ``kernel`` is there if one was built; ``bound`` says that an implementation's callable was.
    """

    kernel: Kernel | None = field(default=None, repr=False)
    bound: bool = False
    verdicts: tuple[Verdict, ...] = ()
    measurement: Measurement | None = None
    baseline: Measurement | None = None
    failure: Cause | None = None
    message: str = ""
    seconds: float = 0.0
