"""Functions that tests have the worker call."""

import os
import time
from typing import Any


def echo(argument: Any, state: Any, phase: Any) -> Any:
    """The argument."""
    return argument


def sleep(argument: float, state: Any, phase: Any) -> None:
    """Nothing, after ``argument`` seconds."""
    time.sleep(argument)


def environment(argument: Any, state: Any, phase: Any) -> list[str]:
    """Names of the variables of the process."""
    return sorted(os.environ)


def pid(argument: Any, state: Any, phase: Any) -> int:
    """Its number."""
    return os.getpid()
