"""Limits of a CUDA launch that hold on every architecture from sm_80 on (CUDA C++ programming guide, compute capabilities)."""

from agentcompile_core.plugin_api import ContractError, Feature, KernelArgument, Launch, StepSource

MAX_THREADS = 1024
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_CLUSTER, LARGEST_CLUSTER = 8, 16  # blocks: everywhere, and of sources that use LARGE_CLUSTER
MAX_AXES, MAX_TILE, MAX_EXTENT, MAX_STRIDE = 5, 256, 2**32, 2**40  # of a tensor map: axes, elements of a tile, of a view, bytes of a step
TILE_BYTES = 16  # what steps and rows of tiles are multiples of


def check_launches(source: StepSource) -> None:
    """Refuse launches that no CUDA device takes.

    Raises:
        ContractError: a block, grid or cluster is too large; the message says which and what is allowed.
    """
    for launch in source.launches:
        _check(launch, LARGEST_CLUSTER if Feature.LARGE_CLUSTER in source.features else MAX_CLUSTER)


def _check(launch: Launch, most_cluster: int) -> None:
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if threads > MAX_THREADS or any(n > limit for n, limit in zip(launch.block, MAX_BLOCK, strict=True)):
        raise ContractError(f"launch {launch.entry}: block {launch.block}; at most {MAX_BLOCK} and {MAX_THREADS} threads")
    if any(n > limit for n, limit in zip(launch.grid, MAX_GRID, strict=True)):
        raise ContractError(f"launch {launch.entry}: grid {launch.grid}; each from 1 to {MAX_GRID}")
    if launch.cluster > most_cluster:
        raise ContractError(f"launch {launch.entry}: cluster of {launch.cluster} blocks; from 1 to {most_cluster}")
    for argument in launch.arguments:
        _check_tiling(launch.entry, argument)


def _check_tiling(entry: str, argument: KernelArgument) -> None:
    tiling, nbytes = argument.tiling, argument.dtype.bytes if argument.dtype else 0
    if tiling is None:
        return
    row, strides = tiling.tile[0] * nbytes, [step * nbytes for step in tiling.steps[1:]]
    fits = len(tiling.extents) <= MAX_AXES and max(tiling.tile) <= MAX_TILE and max(tiling.extents) <= MAX_EXTENT
    aligned = not any(value % TILE_BYTES for value in (row, tiling.offset * nbytes, *strides)) and max(strides, default=0) < MAX_STRIDE
    if not fits or not aligned or (tiling.swizzle and row > tiling.swizzle):
        raise ContractError(f"launch {entry}: {tiling} of {nbytes} bytes an element; at most {MAX_AXES} axes, tiles of {MAX_TILE} "
                            f"along each; steps, offset and rows of tiles multiples of {TILE_BYTES} bytes, rows no longer than a swizzle")
