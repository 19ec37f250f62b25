"""Schedules of one row times a matrix whose columns lie side by side (``gemm_row.cu``)."""

from collections.abc import Iterator
from itertools import product

from agentcompile_cuda_kit.needs import most_registers

from agentcompile_core.plugin_api import Feature, Target

from .shape import ALONG_LINES, VECTOR_BYTES, Shape
from .tile import WARP, Tile

STATIC_SHARED_BYTES = 48 << 10
SUMS, BESIDE = 8, 44  # registers of a thread: sums; addresses, bounds, loop counters
# Threads of a block, terms of a thread in flight, blocks that share the terms; lanes that read a term's columns: of one row times a matrix.
ROW_THREADS, ROW_UNROLL, ROW_CLUSTERS, ROW_LANES = (256, 512), (4, 8), (1, 2, 4, 8), (4, 8, 16, 32)
ROW_BYTES_IN_FLIGHT = 48 << 10  # of an SM, from which on its share of the bandwidth is used
CLUSTER_US = 0.8  # of the barriers of a cluster, and of the sums' way


def row_tiles(shape: Shape, target: Target) -> Iterator[Tile]:
    """Schedules for one row times a matrix whose columns lie side by side."""
    if shape.m != 1 or shape.b.along != ALONG_LINES or shape.b.size == 1:
        return
    clusters = ROW_CLUSTERS if target.has(Feature.CLUSTER) else (1,)
    for lanes, threads, unroll, cluster in product(ROW_LANES, ROW_THREADS, ROW_UNROLL, clusters):
        tile = Tile(path="row", rows=1, columns=lanes * shape.b.size, depth=1, row_threads=threads, unroll=unroll, cluster=cluster)
        enough = cluster == 1 or row_terms(shape, tile) >= threads // lanes * unroll
        fits = row_shared_bytes(tile) <= STATIC_SHARED_BYTES and row_registers(tile) <= most_registers(threads, target)
        if enough and fits and (tile.columns <= shape.n or lanes == min(ROW_LANES)):
            yield tile


def row_registers(tile: Tile) -> int:
    """Registers per thread: sums, and two rounds of vectors."""
    return SUMS + 2 * 4 * tile.unroll + BESIDE


def row_shared_bytes(tile: Tile) -> int:
    """Static shared memory of a block: sums of its warps, and of the blocks of the cluster."""
    return 4 * tile.columns * (tile.threads // WARP + tile.cluster)


def row_terms(shape: Shape, tile: Tile) -> int:
    """Terms of one block of a cluster."""
    return -(-shape.k // tile.cluster)


def row_us(shape: Shape, tile: Tile, target: Target, blocks: int) -> float:
    """A guess to sort by: what the matrix takes at as much of the bandwidth as the bytes in flight ask for, and the cluster's barriers."""
    waves = blocks / target.sm_count
    balance = (-(-blocks // target.sm_count)) / waves if waves > 0.5 else 1.0
    resident = min(2.0, max(1.0, waves)) * min(1.0, waves) * tile.threads * tile.unroll * VECTOR_BYTES
    flight = min(1.0, resident / ROW_BYTES_IN_FLIGHT)
    floor_us = target.floor_us(shape.batch * shape.n * shape.k * shape.dtype.bytes)
    return floor_us / flight * min(1.5, balance) + CLUSTER_US * (tile.cluster > 1)
