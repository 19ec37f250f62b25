"""Limits of a CUDA launch that hold on every architecture from sm_80 on (CUDA C++ programming guide, compute capabilities)."""

from agentcompile_core.plugin_api import ContractError, Launch, StepSource

MAX_THREADS = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_CLUSTER = 8  # blocks, without asking for non-portable sizes


def check_launches(source: StepSource) -> None:
    """Refuse launches that no CUDA device takes.

    Raises:
        ContractError: a block, grid or cluster is too large; the message says which and what is allowed.
    """
    for launch in source.launches:
        _check(launch)


def _check(launch: Launch) -> None:
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if threads > MAX_THREADS or any(n > limit for n, limit in zip(launch.block, MAX_BLOCK, strict=True)):
        raise ContractError(f"launch {launch.entry}: block {launch.block}; at most {MAX_BLOCK} and {MAX_THREADS} threads")
    if any(n > limit for n, limit in zip(launch.grid, MAX_GRID, strict=True)):
        raise ContractError(f"launch {launch.entry}: grid {launch.grid}; each from 1 to {MAX_GRID}")
    if launch.cluster > MAX_CLUSTER:
        raise ContractError(f"launch {launch.entry}: cluster of {launch.cluster} blocks; from 1 to {MAX_CLUSTER}")
