"""Untried kernels run here: a child process that builds, validates and times candidates, and may crash or hang.

``client`` is the parent's side (deadlines, respawn), ``server`` the child's loop, ``evaluate`` what it does with one
job. ``operands``, ``execution`` and ``timing`` make inputs, run a source under guard, and time it. The parent's memory
is never mapped; parent and child speak JSON lines.
"""

from .client import Worker, WorkerLost
from .protocol import Evaluation, Job

__all__ = ["Evaluation", "Job", "Worker", "WorkerLost"]
