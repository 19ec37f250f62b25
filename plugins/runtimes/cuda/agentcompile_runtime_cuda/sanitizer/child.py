"""The process that compute-sanitizer watches: one kernel on memory of exactly its sizes, by the driver alone.

No torch: its kernels would be watched too, and what they write would not count as initialised. Called with a folder that holds
``request.json`` (see ``running.request``) and the files it names.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from agentcompile_core.plugin_api import Launch, serial

from .. import launching
from ..driver import Driver, driver

DONE = "agentcompile: every launch has ended"


class _Memory:
    """Device memory of exactly the sizes that are asked for."""

    def __init__(self, library: Any, checked: Driver) -> None:
        self._library, self._check = library, checked.check

    def context(self) -> None:
        """Make the primary context of the first device current."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check("starting CUDA", self._library.cuInit(0))
        self._check("opening the device", self._library.cuDeviceGet(ctypes.byref(device), 0))
        self._check("opening the device", self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self._check("opening the device", self._library.cuCtxSetCurrent(context))

    def buffer(self, nbytes: int, contents: bytes | None) -> int:
        """The address of a new buffer; without ``contents`` nothing is written to it."""
        address = ctypes.c_uint64()
        self._check("allocating", self._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(1, nbytes))))
        if contents:
            self._check("copying", self._library.cuMemcpyHtoD_v2(address, ctypes.c_char_p(contents), ctypes.c_size_t(len(contents))))
        return int(address.value)

    def synchronize(self) -> None:
        """Wait for everything."""
        self._check("running the kernel", self._library.cuCtxSynchronize())


def main(folder: Path) -> None:
    """Run every launch of every case once."""
    request = json.loads((folder / "request.json").read_text())
    library, checked = ctypes.CDLL("libcuda.so.1"), driver()
    memory = _Memory(library, checked)
    memory.context()
    kernel = launching.LoadedKernel(checked, (folder / "kernel.cubin").read_bytes(), request["sha256"])
    launches = [serial.structure(one, Launch) for one in request["launches"]]
    for case in request["cases"]:
        addresses = {}
        for name, nbytes, file in case["buffers"]:
            contents = None if file is None else (folder / file).read_bytes() if file else bytes(nbytes)
            addresses[name] = memory.buffer(nbytes, contents)
        for launch in launches:
            values = [addresses.get(a.operand, 0) if a.addressed else a.value for a in launch.arguments]
            launching.prepare(kernel, launch, values, pdl=False)(0)
            memory.synchronize()
    sys.stdout.write(f"{DONE}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
