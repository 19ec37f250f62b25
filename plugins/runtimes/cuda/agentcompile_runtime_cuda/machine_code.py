"""What is looked at in machine code: whether a kernel that may start early waits for the one before it, and where it copies in bulk."""

import struct

from agentcompile_core.plugin_api import BuildError, Feature, StepSource, Target

INSTRUCTION_BYTES = 16
OPCODE_BITS = 0xFFF
WAIT = 0x82E  # what griddepcontrol.wait becomes on sm_90 to sm_120; a test compiles kernels with and without it
# What cp.async.bulk into shared memory becomes on the same (the same test), and cp.async.bulk.tensor for one block and for a cluster (a
# test of the gemm family).
BULK_COPIES = (0x3BA, 0x5B4, 0x3B4)
FUNCTION_SECTION = ".text."


def check_waits(source: StepSource, target: Target, binary: bytes) -> None:
    """Refuse a source that declares ``pdl`` for a kernel whose machine code holds no dependency wait.

    Without a wait the kernel reads what the one before it may not have written yet. Where in the code the wait is, and what
    is read before it, the emulator says. On targets without dependent launches there is nothing to wait for.

    Raises:
        BuildError: so it is.
    """
    if not target.has(Feature.GRIDDEPCONTROL):
        return
    early = {launch.entry for launch in source.launches if launch.pdl}
    code = functions(binary) if early else {}
    shared = any(_waits(text) for name, text in code.items() if name not in {launch.entry for launch in source.launches})
    for entry in sorted(early):
        if not shared and not _waits(code.get(entry, b"")):
            raise BuildError(f"{entry} is launched before the kernel in front of it has ended (pdl), and its machine code never waits for "
                             "that: call ac::grid_dependency_wait() before anything is read that the chain writes, or declare no pdl")


def _waits(code: bytes) -> bool:
    return WAIT in _opcodes(code)


def bulk_copies(binary: bytes) -> frozenset[tuple[str, int]]:
    """Function and byte offset of every instruction of a cubin that copies in bulk into shared memory.

    Raises:
        BuildError: the binary is no ELF file with sections.
    """
    return frozenset((name, number * INSTRUCTION_BYTES) for name, code in functions(binary).items()
                     for number, opcode in enumerate(_opcodes(code)) if opcode in BULK_COPIES)


def _opcodes(code: bytes) -> list[int]:
    starts = range(0, len(code) - INSTRUCTION_BYTES + 1, INSTRUCTION_BYTES)
    return [struct.unpack_from("<H", code, at)[0] & OPCODE_BITS for at in starts]


def functions(binary: bytes) -> dict[str, bytes]:
    """The machine code of a cubin by function.

    Raises:
        BuildError: the binary is no ELF file with sections.
    """
    try:
        if binary[:4] != b"\x7fELF":
            raise ValueError("no ELF file")
        (offset,) = struct.unpack_from("<Q", binary, 0x28)
        size, count, names = struct.unpack_from("<HHH", binary, 0x3A)
        sections = [struct.unpack_from("<IIQQQQ", binary, offset + i * size) for i in range(count)]
        table = sections[names][4]
        found = {}
        for name, _, _, _, start, length in sections:
            text = binary[table + name:binary.index(b"\0", table + name)].decode()
            if text.startswith(FUNCTION_SECTION):
                found[text.removeprefix(FUNCTION_SECTION)] = binary[start:start + length]
        return found
    except (ValueError, struct.error, IndexError, OverflowError) as exc:
        raise BuildError(f"the compiler's output cannot be read ({exc})") from exc
