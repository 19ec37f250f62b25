"""What the "kernels" of ``FakeBackend`` do: an addition, or one of the ways in which kernels go wrong, by a word."""

import ctypes
import math
import os
import re
import struct
import sys
import time
from typing import Any

BEHAVIOURS = {
    "honest": "adds",
    "wrong": "is off by 1 %",
    "nans": "writes NaN everywhere",
    "unwritten": "leaves the last element as it was",
    "outside": "writes one element behind the end",
    "input": "changes its input",
    "lies": "adds correctly the first few times only",
    "stops": "adds the first 16 times and then returns at once",
    "lazy": "returns at once if its output holds numbers already",
    "caches": "adds once for each address and returns that result from then on",
    "input_later": "adds; changes its input from the 17th time on",
    "outside_later": "adds; writes one element behind the end from the 17th time on",
    "abort": "calls abort()",
    "segfault": "reads address 0",
    "exit": "exits the process",
    "hang": "never returns",
    "raises": "raises an exception",
    "no_build": "does not compile",
    "prints": "writes to standard output, then adds",
    "nan_time": "adds; its timing is NaN",
    "too_fast": "adds; its timing is beyond the memory bandwidth",
}
HONEST_RUNS = 6  # of a kernel that lies
WORKING_RUNS = 16  # of one that stops, or does more harm later


def word(text: str, name: str, default: str) -> str:
    """What the text says of ``name``, such as ``us``."""
    found = re.search(rf"\b{name}=(\S+)", text)
    return found.group(1) if found else default


def without_work(behaviour: str, runs: int, kept: dict[int, bytes], in0: int, in1: int, out: int, count: int) -> bool:
    """Whether a kernel that cheats is done without adding: it stopped, its output is full, or it kept an earlier result."""
    if behaviour == "stops":
        return runs > WORKING_RUNS
    if behaviour == "lazy":
        return all(math.isfinite(value) and value not in (777.0, -333.0) for value in floats(out, count))
    if behaviour != "caches":
        return False
    if in0 not in kept:
        kept[in0] = b"".join(struct.pack("f", a + b) for a, b in zip(floats(in0, count), floats(in1, count), strict=True))
    ctypes.memmove(out, kept[in0], 4 * count)
    return True


def behave(behaviour: str, runs: int, in0: int, in1: int, out: int, count: int) -> None:
    """The addition of ``count`` floats at three addresses, or what is done instead; ``runs``: how many this one makes."""
    if behaviour == "abort":
        os.abort()
    if behaviour == "segfault":
        ctypes.string_at(0)
    if behaviour == "exit":
        os._exit(7)
    if behaviour == "hang":
        time.sleep(1e6)
    if behaviour == "raises":
        raise RuntimeError("the fake kernel was told to fail")
    if behaviour == "prints":
        sys.stdout.write("this is no message\n")
        os.write(1, b"nor is this\n")
    a, b, c = (floats(address, count + 1) for address in (in0, in1, out))
    factor = 1.01 if behaviour == "wrong" or (behaviour == "lies" and runs > HONEST_RUNS) else 1.0
    written = count - 1 if behaviour == "unwritten" else count
    for i in range(written):
        c[i] = float("nan") if behaviour == "nans" else (a[i] + b[i]) * factor
    later = runs > WORKING_RUNS
    if behaviour == "outside" or (behaviour == "outside_later" and later):
        c[count] = 1.0
    if behaviour == "input" or (behaviour == "input_later" and later):
        a[0] = c[0]


def floats(address: int, count: int) -> Any:
    """The memory there."""
    return (ctypes.c_float * count).from_address(address)
