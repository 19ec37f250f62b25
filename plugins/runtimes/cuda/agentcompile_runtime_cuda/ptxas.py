"""What compilers say, as values: resources of each entry from ``ptxas -v``, the first error line of a failed build."""

import re

from attrs import frozen

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_ERROR = re.compile(r"\b(?:fatal |catastrophic )?error\b\s*(?:#\S+)?\s*:", re.IGNORECASE)


@frozen(kw_only=True)
class EntryResources:
    """Registers per thread, static shared memory per block, bytes that one thread spills, and its local memory, of one entry."""

    registers: int = 0
    static_shared_bytes: int = 0
    spill_bytes: int = 0
    local_bytes: int = 0


def parse(log: str) -> dict[str, EntryResources]:
    """Resources by entry name, in the order in which ptxas compiled them."""
    found: dict[str, EntryResources] = {}
    for part in re.split(r"(?=Compiling entry function)", log):
        entry = _ENTRY.search(part)
        if entry:
            spill, registers, shared = _SPILL.search(part), _REGISTERS.search(part), _SHARED.search(part)
            found[entry[1]] = EntryResources(
                registers=int(registers[1]) if registers else 0,
                static_shared_bytes=int(shared[1]) if shared else 0,
                spill_bytes=int(spill[2]) + int(spill[3]) if spill else 0,
                local_bytes=int(spill[1]) if spill else 0,
            )
    return found


def first_error(log: str) -> str:
    """The first line of a compiler's log that is an error; its last line where none looks like one."""
    lines = [line.strip() for line in log.replace("\0", "").splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return f"{errors[0]}{more}"
    return lines[-1] if lines else "the compiler failed without a message"
