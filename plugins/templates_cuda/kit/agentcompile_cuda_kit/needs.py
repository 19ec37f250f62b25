"""What a schedule needs of an SM before it is built, and the words for what rules schedules out."""

from agentcompile_core.plugin_api import Needs, Target

MOST_REGISTERS = 255  # of a thread
SHARED_RESERVED_PER_BLOCK = 1024  # what the driver keeps of an SM's shared memory for each resident block
REGISTERS = "more registers than its blocks leave a thread"
SHARED = "more shared memory than a block may have"
FEW_BLOCKS = "too few of its blocks fit on an SM at once"


def most_registers(threads: int, target: Target) -> int:
    """Registers that each thread of a block may have; they are given out by eights."""
    return min(MOST_REGISTERS, target.registers_per_sm // threads // 8 * 8)


def block_needs(target: Target, *, threads: int, registers: int = 0, shared_bytes: int = 0) -> Needs:
    """The needs of a block; 0 registers: nobody knows."""
    return Needs(threads=threads, registers=registers, most_registers=most_registers(threads, target), shared_bytes=shared_bytes)
