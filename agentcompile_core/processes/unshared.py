"""What a fork shares with its parent beyond a copy of its memory, made its own: shared memory, and where open files stand.

Left as they are: files that are open to be read and written, sockets, pipes and devices.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat

MOST_BYTES = 1 << 30
_MAP_FIXED = 0x10
_MEMORY = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV")  # beside mapped files; of what else the kernel maps, reading may do something


def own_memory() -> None:
    """What is shared and can be written to (tensors, semaphores of multiprocessing, mapped files) is a copy from now on.

    Raises:
        MemoryError: it is more than ``MOST_BYTES``, or the system does not allow it.
    """
    with open("/proc/self/maps") as maps:
        shared = [span for line in maps if (span := _shared(line)) is not None]
    if sum(end - begin for begin, end in shared) > MOST_BYTES:
        raise MemoryError("more memory is shared than a fork copies")
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    for begin, end in shared:
        held = ctypes.string_at(begin, end - begin)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if libc.mmap(begin, end - begin, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != begin:
            raise MemoryError("shared memory cannot be copied")
        ctypes.memmove(begin, held, end - begin)


def _shared(line: str) -> tuple[int, int] | None:
    """The first address and the one behind the last, of a line of ``/proc/PID/maps`` that means shared memory that can be written to."""
    span, allowed, _, _, _, *name = line.split(maxsplit=5)
    path = name[0] if name else ""
    if not allowed.startswith("rw") or allowed[3] != "s" or not path.startswith("/") or path.startswith("/dmabuf"):
        return None
    if path.startswith("/dev/") and not path.startswith(_MEMORY):
        return None
    begin, end = (int(address, 16) for address in span.split("-"))
    return begin, end


def own_files() -> None:
    """Files that are open to be read are read on from where they stand, by this process alone; what is written to others is lost."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                continue
            mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            if mode == os.O_RDONLY:
                own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
                os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(own, descriptor, os.get_inheritable(descriptor))
                os.close(own)
            elif mode == os.O_WRONLY:
                os.dup2(nothing, descriptor, os.get_inheritable(descriptor))
    os.close(nothing)
