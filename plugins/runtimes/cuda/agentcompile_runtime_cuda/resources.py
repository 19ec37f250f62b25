"""What a built source uses of a multiprocessor, and whether its launches fit on one."""

from agentcompile_core.plugin_api import BuildError, Launch, Resources, StepSource, Target

from . import ptxas

REGISTER_STEP = 8  # of a thread: so many are given out at once


def resources_of(source: StepSource, target: Target, entries: dict[str, ptxas.EntryResources]) -> Resources:
    """The largest figures over the launches of ``source``, whose ``entries`` use so much; shared memory is static plus dynamic.

    Raises:
        BuildError: an entry is missing, or a launch needs more shared memory or registers than the target has.
    """
    shared = 0
    for launch in source.launches:
        if launch.entry not in entries:
            known = ", ".join(entries) or "none"
            raise BuildError(f"the source defines no kernel {launch.entry!r}; it defines {known}")
        needed = entries[launch.entry].static_shared_bytes + launch.shared_bytes
        if needed > target.shared_bytes_per_block:
            raise BuildError(f"{launch.entry} needs {needed} bytes of shared memory per block; "
                             f"{target.name} allows {target.shared_bytes_per_block}")
        shared = max(shared, needed)
        _check_registers(launch, entries[launch.entry].registers, target)
    used = [entries[launch.entry] for launch in source.launches] or list(entries.values())
    return Resources(registers=max((e.registers for e in used), default=0), shared_bytes=shared,
                     spill_bytes=max((e.spill_bytes for e in used), default=0),
                     local_bytes=max((e.local_bytes for e in used), default=0))


def _check_registers(launch: Launch, registers: int, target: Target) -> None:
    """Registers are given to whole warps, by eights per thread; a block that wants more than an SM has is never launched."""
    warps = -(-launch.block[0] * launch.block[1] * launch.block[2] // target.lanes)
    needed = warps * target.lanes * -(-registers // REGISTER_STEP) * REGISTER_STEP
    if needed > target.registers_per_sm > 0:
        raise BuildError(f"too many registers: {launch.entry} needs {registers} in each of {warps * target.lanes} threads, {needed} per "
                         f"block; {target.name} has {target.registers_per_sm} per SM; declare the block with __launch_bounds__")
