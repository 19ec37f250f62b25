"""The gemm family: products of matrices, batched and in any layout, with a pointwise tail."""

from pathlib import Path
from typing import Literal

from agentcompile_cuda_kit import block_needs, c_type, epilogue_struct, make_source, operand_pointer
from attrs import evolve

from agentcompile_core.plugin_api import (
    MATMUL,
    Access,
    ContractError,
    DType,
    Feature,
    KernelArgument,
    Launch,
    Match,
    Needs,
    Operand,
    Reject,
    Role,
    Schedule,
    ScheduleSpace,
    StepSource,
    Target,
    TemplateFamily,
    Workspace,
    i32,
    i64,
    null,
    pointer,
    tiles,
)

from .shape import ALONG_TERMS, Reading, Shape, shape_of
from .space import blocks_of, grid_of, registers_of, shared_bytes, space_of, splits_of, terms_of, warpgroup_registers
from .tile import Tile, tile_of

FOLDER = Path(__file__).parent
DTYPES = (DType.F16, DType.BF16, DType.F32)
MOST_AUX = 3
FULL, ROW, REPEATS, SCALAR, ABSENT = range(5)  # as in gemm.cuh
TEXTS = {"simt": "gemm.cu", "tensor": "gemm_tensor.cu", "wgmma": "gemm_wgmma.cu", "bf16x6": "gemm_bf16x6.cu",
         "row": "gemm_row.cu"}
FEATURES = {"simt": [], "row": [], "tensor": [Feature.MMA_SYNC], "bf16x6": [Feature.MMA_SYNC],
            "wgmma": [Feature.WGMMA, Feature.BULK_COPY, Feature.MBARRIER]}
GROUP = 8  # rows of tiles that are taken together
FINISH_THREADS = 256
SPAN, WIDE = 64, 8  # elements: what the copy engine fetches side by side, what is stored at once (wgmma.cuh)
STEPS = tuple(f"{factor}_{step}" for factor in "ab" for step in ("offset", "outer", "inner", "row", "column"))
Value = bool | int | float | str


class GemmFamily(TemplateFamily):
    """``matmul`` matches: out[g, i, j] = epilogue(sum over t of a[g, i, t] b[g, t, j]), with factors in any steps.

    The terms may be dealt out to several blocks; a second launch then adds the parts in their order, so that results never
    depend on which block comes first.
    """

    name = "gemm"
    version = 2

    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """True for factors of one type of float16, bfloat16 and float32 that some tile of the target can hold."""
        if match.kind != MATMUL:
            return Reject(f"gemm serves {MATMUL} matches, not {match.kind}")
        reason = _type_problem(match) or _size_problem(match)
        if reason:
            return Reject(reason)
        if not self.space(match, target).points:
            return Reject(f"no tile of this product fits into shared memory, registers and grid of {target.name}")
        return True

    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """At most 68 points."""
        return space_of(shape_of(match), target)

    def needs(self, match: Match, schedule: Schedule, target: Target) -> Needs:
        """Threads, registers and shared memory of the tile."""
        tile = tile_of(schedule)
        return block_needs(target, threads=tile.threads, registers=registers_of(tile), shared_bytes=shared_bytes(tile))

    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """One launch; a second one and a workspace where the terms are dealt out."""
        shape, tile = shape_of(match), tile_of(schedule)
        splits, pdl = splits_of(shape, tile), target.has(Feature.GRIDDEPCONTROL)
        product = Launch(entry="gemm_kernel", grid=(grid_of(shape, tile, target), splits, 1), block=(tile.threads, 1, 1), pdl=pdl,
                         shared_bytes=shared_bytes(tile) if tile.tensor else 0, cluster=tile.cluster,
                         arguments=_arguments(match, shape, tile, splits))
        finish = Launch(entry="gemm_finish_kernel", grid=(-(-shape.count // FINISH_THREADS), 1, 1), block=(FINISH_THREADS, 1, 1), pdl=pdl,
                        arguments=_finish_arguments(match, shape, splits))
        workspace = Workspace(name="parts", nbytes=4 * splits * shape.count)
        return make_source(
            FOLDER / TEXTS[tile.path], plan=_plan(match, shape, tile, splits, pdl),
            launches=(product, finish) if splits > 1 else (product,), epilogue=epilogue_struct(match.epilogue, 1, MOST_AUX),
            features=[Feature.GRIDDEPCONTROL] * pdl + [Feature.CLUSTER] * (tile.cluster > 1) + FEATURES[tile.path],
            workspaces=(workspace,) if splits > 1 else (), reduction_depth=min(terms_of(shape, tile), shape.k) + splits)


def _plan(match: Match, shape: Shape, tile: Tile, splits: int, pdl: bool) -> dict[str, Value]:
    out = match.need("out").spec.dtype
    aux = [match.operand(f"aux{i}") for i in range(MOST_AUX)]
    types: dict[str, Value] = {"Element": c_type(shape.dtype), "T": c_type(out)}
    types |= {f"Aux{i}": c_type(operand.spec.dtype if operand else out) for i, operand in enumerate(aux)}
    own: dict[str, Value] = {"thread_rows": tile.thread_rows, "thread_columns": tile.thread_columns}
    if tile.tensor:
        wide = (tile.ahead or tile.by_warpgroups) and out is not DType.F32 and shape.whole > 1 and shape.n % WIDE == 0 and splits == 1
        own = {"warp_rows": tile.warp_rows, "warp_columns": tile.warp_columns, "stages": tile.stages, "ahead": tile.ahead,
               "wide_stores": wide and tile.warp_columns % (4 * WIDE) == 0}
    if tile.of_one_row:
        early = match.need("b").role in (Role.WEIGHT, Role.CONSTANT)
        own = {"unroll": tile.unroll, "cluster": tile.cluster, "b_early": early}
    if tile.in_pieces:
        own = {"warp_rows": tile.warp_rows, "warp_columns": tile.warp_columns}
    if tile.by_warpgroups:
        copier, others = warpgroup_registers(tile)
        own = {"warp_rows": tile.warp_rows, "stages": tile.stages, "cluster": tile.cluster, "copier_registers": copier, "registers": others,
               "wide_stores": wide}
    return {
        **types, "pdl": pdl, "threads": tile.threads, "rows": tile.rows, "columns": tile.columns, "depth": tile.depth, **own,
        "group": GROUP, "split": splits > 1, "a_along": shape.a.along, "a_size": shape.a.held_by(tile.rows),
        "b_along": shape.b.along, "b_size": shape.b.held_by(tile.columns),
        "whole_stores": shape.whole % (2 if tile.tensor else min(4, tile.thread_columns or 1)) == 0,
        **{f"aux_kind{i}": _kind(operand, shape) for i, operand in enumerate(aux)},
    }


def _kind(operand: Operand | None, shape: Shape) -> int:
    if operand is None:
        return ABSENT
    size = operand.spec.numel
    return SCALAR if size == 1 else FULL if size == shape.count else ROW if size == shape.n else REPEATS


def _aux(match: Match) -> tuple[KernelArgument, ...]:
    return tuple(operand_pointer(match, f"aux{i}") for i in range(MOST_AUX))


def _periods(match: Match) -> tuple[KernelArgument, ...]:
    sizes = ((f"period{i}", match.operand(f"aux{i}")) for i in range(MOST_AUX))
    return tuple(i64(name, operand.spec.numel if operand else 1) for name, operand in sizes)


def _out(match: Match) -> KernelArgument:
    return pointer("out", Role.OUTPUT, match.need("out").spec.dtype, Access.WRITE)


def _arguments(match: Match, shape: Shape, tile: Tile, splits: int) -> tuple[KernelArgument, ...]:
    target = (null("out"), _parts(Access.WRITE)) if splits > 1 else (_out(match), null("parts"))
    aux = tuple(null(f"aux{i}") for i in range(MOST_AUX)) if splits > 1 else _aux(match)
    if tile.by_warpgroups:
        return _warpgroup_arguments(match, shape, tile, (*aux, *target))
    sizes = (i32("inner", match.integer("inner")), i32("m", shape.m), i32("n", shape.n), i64("k", shape.k),
             i64("terms", terms_of(shape, tile)), i64("count", shape.count))
    steps = tuple(i64(name, match.integer(name)) for name in STEPS)
    return (operand_pointer(match, "a"), operand_pointer(match, "b"), *aux, *target, *sizes, *steps, *_periods(match))


def _warpgroup_arguments(match: Match, shape: Shape, tile: Tile, results: tuple[KernelArgument, ...]) -> tuple[KernelArgument, ...]:
    sizes = (i32("inner", match.integer("inner")), i32("m", shape.m), i32("n", shape.n), i64("k", shape.k),
             i64("terms", terms_of(shape, tile)), i64("count", shape.count), i64("tiles", blocks_of(shape, tile) // tile.cluster))
    moves = tuple(i32(f"{factor}_{axis}", value) for factor, reading in (("a", shape.a), ("b", shape.b))
                  for axis, value in zip(("outer", "inner"), reading.moves, strict=True))
    factors = (_tiles(match.need("a"), shape.a, tile.rows), _tiles(match.need("b"), shape.b, tile.columns // tile.cluster))
    return (*factors, *results, *sizes, *moves, *_periods(match))


def _tiles(factor: Operand, reading: Reading, lines: int) -> KernelArgument:
    """Tiles of 64 neighbours by so many lines where these are terms, by 64 terms where they are lines."""
    assert reading.view is not None
    box = (SPAN, lines if reading.along == ALONG_TERMS else SPAN, 1, 1)
    return tiles(factor.name, factor.role, factor.spec.dtype, evolve(reading.view, tile=box, swizzle=SPAN * factor.spec.dtype.bytes))


def _finish_arguments(match: Match, shape: Shape, splits: int) -> tuple[KernelArgument, ...]:
    return (_parts(Access.READ), *_aux(match), _out(match), i64("count", shape.count), i32("n", shape.n), i32("splits", splits),
            *_periods(match))


def _parts(access: Access) -> KernelArgument:
    return pointer("parts", Role.WORKSPACE, DType.F32, access)


def _type_problem(match: Match) -> str:
    for name in ("a", "b", "out"):
        if match.operand(name) is None:
            return f"the match has no operand {name!r}"
    for operand in match.operands:
        if operand.spec.dtype not in DTYPES:
            return f"operand {operand.name} is {operand.spec.dtype.value}; float16, bfloat16 and float32 are served"
        if operand.spec.strides:
            return f"operand {operand.name} is not contiguous"
    a, b = match.need("a").spec.dtype, match.need("b").spec.dtype
    return "" if a is b else f"a {a.value} times a {b.value} matrix; factors of one type are served"


def _size_problem(match: Match) -> str:
    extents = {name: match.integer(name) for name in ("outer", "inner", "m", "n", "k")}
    if min(extents.values()) < 1 or max(extents.values()) >= 1 << 31:
        return f"extents {extents}: each must be a positive 32-bit integer"
    count = extents["outer"] * extents["inner"] * extents["m"] * extents["n"]
    if match.need("out").spec.numel != count:
        return f"the result has {match.need('out').spec.numel} elements, expected {count}"
    names = [operand.name for operand in match.operands if operand.name.startswith("aux")]
    if len(names) > MOST_AUX or any(count % max(1, match.need(name).spec.numel) for name in names):
        return f"{len(names)} further operands; at most {MOST_AUX} that repeat along the leading axes are served"
    try:
        epilogue_struct(match.epilogue, 1, MOST_AUX)
    except ContractError as error:
        return f"epilogue: {error}"
    return ""
