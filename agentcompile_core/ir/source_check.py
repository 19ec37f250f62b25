"""Where launches meet memory: argument values of a launch, and the core's check of a source's declared arguments.

Everything that reads roles relies on :func:`check_source`: poisoning (OUTPUT, WORKSPACE), checksums (everything a launch
may only read), programmatic dependent launch (before its wait a kernel may read WEIGHT and CONSTANT operands only; the
roles come from the match, so a source cannot declare an activation to be a weight), buffer planning and emission.
"""

from collections.abc import Mapping

from ..errors import ContractError
from .candidate import ArgumentKind, KernelArgument, Launch, StepSource
from .region import Access, Match, Role
from .target import Target

_I32 = range(-(2**31), 2**31)
_I64 = range(-(2**63), 2**63)


def argument_values(launch: Launch, addresses: Mapping[str, int]) -> tuple[int | float, ...]:
    """Values of the arguments of ``launch`` in order: device addresses of pointers and tiles (null: 0), scalars as they are.

    ``addresses`` maps operand and workspace names to addresses.

    Raises:
        ContractError: a pointer names something that has no address.
    """
    missing = [a.operand for a in launch.arguments if a.addressed and a.operand and a.operand not in addresses]
    if missing:
        have = ", ".join(sorted(addresses)) or "none"
        raise ContractError(f"launch {launch.entry} needs addresses of {', '.join(missing)}; there are addresses of: {have}")
    return tuple(_value(argument, addresses) for argument in launch.arguments)


def _value(argument: KernelArgument, addresses: Mapping[str, int]) -> int | float:
    if not argument.addressed:
        return argument.value
    return addresses[argument.operand] if argument.operand else 0


def check_source(match: Match, source: StepSource, target: Target | None = None) -> None:
    """Check the declared arguments of ``source`` against ``match``, and its launches against the limits of ``target``.

    What limits the backend of the target has beyond that, it checks itself (``Backend.check``).

    Every pointer is null, a declared workspace, or an operand of the match with its role and dtype and no more access
    than the operand grants (an output may be read once a launch has written it). Every OUTPUT operand is written.

    Raises:
        ContractError: one of these does not hold; the message says which.
    """
    if not source.launches:
        raise ContractError(f"{_about(match, source)}: there is no launch")
    workspaces = {workspace.name: workspace for workspace in source.workspaces}
    clash = sorted(workspaces.keys() & {operand.name for operand in match.operands})
    if clash or len(workspaces) != len(source.workspaces):
        raise ContractError(f"{_about(match, source)}: workspace names must be unique and not those of operands: {clash}")
    for workspace in source.workspaces:
        if workspace.nbytes <= 0:
            raise ContractError(f"{_about(match, source)}: workspace {workspace.name} has {workspace.nbytes} bytes")
    written: set[str] = set()
    for launch in source.launches:
        _check_launch(match, source, launch, target)
        for argument in launch.arguments:
            _check_argument(match, source, argument, frozenset(workspaces), frozenset(written))
        written.update(a.operand for a in launch.arguments if a.operand and a.access is not Access.READ)
    unwritten = [o.name for o in match.operands if o.role is Role.OUTPUT and o.name not in written]
    if unwritten:
        raise ContractError(f"{_about(match, source)}: no launch writes output {', '.join(unwritten)}")
    if target is not None:
        lacking = [feature for feature in source.features if not target.has(feature)]
        if lacking:
            raise ContractError(f"{_about(match, source)}: uses {', '.join(lacking)}, which {target.name} ({target.arch}) lacks")


def _about(match: Match, source: StepSource) -> str:
    return f"source {source.digest} of {match.id}"


def _check_argument(
    match: Match, source: StepSource, argument: KernelArgument, workspaces: frozenset[str], written: frozenset[str]
) -> None:
    where = f"{_about(match, source)}: argument {argument.name}"
    if not argument.addressed:
        _check_scalar(where, argument)
        return
    if argument.kind is ArgumentKind.TILES or argument.tiling:
        _check_tiling(where, match, argument)
    if not argument.operand:
        if argument.role is not None:
            raise ContractError(f"{where} is null but has the role {argument.role.value}")
        return
    if argument.operand in workspaces:
        if argument.role is not Role.WORKSPACE:
            raise ContractError(f"{where} points to a workspace but has the role {argument.role and argument.role.value}")
        return
    operand = match.operand(argument.operand)
    if operand is None:
        allowed = ", ".join(sorted((*workspaces, *(o.name for o in match.operands))))
        raise ContractError(f"{where} points to {argument.operand!r}, which is no operand or workspace; there are: {allowed}")
    if argument.role is not operand.role:
        seen = argument.role.value if argument.role else "none"
        raise ContractError(f"{where} has the role {seen}; operand {operand.name} has {operand.role.value}")
    if argument.dtype is not operand.spec.dtype:
        seen = argument.dtype.value if argument.dtype else "none"
        raise ContractError(f"{where} has the dtype {seen}; operand {operand.name} has {operand.spec.dtype.value}")
    if argument.access is not Access.READ and operand.access is Access.READ:
        raise ContractError(f"{where} writes operand {operand.name}, which may only be read")
    if argument.access is not Access.WRITE and operand.access is Access.WRITE and operand.name not in written:
        raise ContractError(f"{where} reads output {operand.name} before any launch has written it")


def _check_tiling(where: str, match: Match, argument: KernelArgument) -> None:
    operand, tiling = match.operand(argument.operand), argument.tiling
    if operand is None or tiling is None or argument.kind is not ArgumentKind.TILES or argument.access is not Access.READ:
        raise ContractError(f"{where}: a tiling belongs to an argument of the kind tiles that reads an operand of the match")
    axes = len(tiling.extents)
    if not axes or len(tiling.steps) != axes or len(tiling.tile) != axes or min(*tiling.extents, *tiling.steps, *tiling.tile) < 1:
        raise ContractError(f"{where}: extents {tiling.extents}, steps {tiling.steps}, tile {tiling.tile}; "
                            "each has one number from 1 on for every axis")
    if tiling.steps[0] != 1 or tiling.offset < 0 or tiling.end > operand.spec.numel or tiling.swizzle not in (0, 128):
        raise ContractError(f"{where}: offset {tiling.offset}, extents {tiling.extents}, steps {tiling.steps}, swizzle {tiling.swizzle}; "
                            f"the view must lie in the {operand.spec.numel} elements of {operand.name}, its first step be 1, "
                            "a swizzle 0 or 128")


def _check_scalar(where: str, argument: KernelArgument) -> None:
    if argument.operand or argument.role is not None:
        raise ContractError(f"{where} is a scalar but names an operand or a role")
    if argument.kind is ArgumentKind.F32:
        return
    if type(argument.value) is not int or argument.value not in (_I32 if argument.kind is ArgumentKind.I32 else _I64):
        raise ContractError(f"{where} is {argument.kind.value} but has the value {argument.value!r}")


def _check_launch(match: Match, source: StepSource, launch: Launch, target: Target | None) -> None:
    where = f"{_about(match, source)}: launch {launch.entry}"
    if source.digest not in launch.entry:
        raise ContractError(f"{where}: the entry's name must carry the digest, so that two schedules can live in one binary")
    for what, extents in (("block", launch.block), ("grid", launch.grid)):
        if any(n < 1 for n in extents):
            raise ContractError(f"{where}: {what} {extents}; each from 1 on")
    if launch.cluster < 1 or launch.grid[0] % launch.cluster:
        raise ContractError(f"{where}: cluster of {launch.cluster} blocks; it must divide the grid {launch.grid}")
    limit = target.shared_bytes_per_block if target else 0
    if launch.shared_bytes < 0 or (limit and launch.shared_bytes > limit):
        raise ContractError(f"{where}: {launch.shared_bytes} bytes of shared memory; {target and target.name} allows {limit}")
