"""Scans whose heads decay as one (Mamba-2), many tokens at a time by the tensor cores of ``scan_chunks.cu``."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentcompile_cuda_kit import c_type, make_source
from attrs import evolve, frozen

from agentcompile_core.plugin_api import Access, Backend, DType, KernelArgument, Launch, Role, StepSource, Target, i32, pointer

from .own_kernels import OwnKernels
from .recurrent_rows import Kind, dense_copy, has_known_state, in_quads, row_step, rows_of, state_steps

if TYPE_CHECKING:
    import torch

    from agentcompile_core.plugin_api import RecurrenceCall
TEMPLATE = Path(__file__).with_name("scan_chunks.cu")
WARP, STEP, MOST_PIECES, REGISTERS, FEWEST_REGISTERS = 32, 16, 3, 65536, 200
RESERVED_BYTES = 1024  # of each block's shared memory
VECTOR_BYTES = 16
PIECE_BYTES, FLOAT_BYTES = 2, 4
MOST_TERMS = 64  # of 16 rows that a warp keeps
# Tokens of a call from which on chunks win (H100, us of a layer, chunks and token by token: of 1,024 tokens Mamba2-2.7B 89 and 202,
# Falcon-H1 82 and 168; of 128 tokens 20 and 26, 21 and 24, Nemotron-H 32 and 32).
FEWEST_TOKENS, MOST_ELEMENTS = 64, 2**31 - 1  # places are counted in 32 bits
PIECES_OF_X = {DType.BF16: 1, DType.F16: 2, DType.F32: 3}
LINES = (16, 32, 64, 128, 256)  # terms and rows of a block whose lines lie permuted
PRODUCTS = (("keys", "queries", "x", "valid"), ("key_pieces", "query_pieces", "own_pieces", "of_keys", "counts"),
            ("tokens", "groups", "all_rows", "x_token", "x_row", "key_token", "key_group", "query_token", "query_group"))
SCAN = (("state", "decay", "x", "rates", "valid", "skip", "key_pieces", "query_pieces", "of_keys", "counts"), ("y", "last"),
        ("tokens", "groups", "all_rows", "state_row", "state_term", "x_token", "decay_token", "decay_head"))
TYPES = {"valid": DType.I64, "key_pieces": DType.BF16, "query_pieces": DType.BF16, "own_pieces": DType.BF16, "counts": DType.I32}


@frozen(kw_only=True)
class ChunkSchedule:
    """Tokens of a chunk, rows of a block and its warps."""

    chunk: int
    rows: int
    warps: int

    @property
    def token_tiles(self) -> int:
        """Of a chunk."""
        return self.chunk // STEP

    def shared_bytes(self, kind: Kind, x_pieces: int) -> int:
        """Two slots of queries and keys, what tokens have of their own, twice, and the state."""
        slots = 2 * 2 * self.chunk * kind.terms * PIECE_BYTES
        own = 2 * (x_pieces * self.chunk * self.rows * PIECE_BYTES + (self.chunk + 1) * 4 * FLOAT_BYTES)
        return slots + own + MOST_PIECES * self.rows * kind.terms * PIECE_BYTES

    def blocks(self, kind: Kind, x_pieces: int, target: Target) -> int:
        """Of a multiprocessor at a time, as many as leave each thread its registers."""
        room = target.shared_bytes_per_sm // (self.shared_bytes(kind, x_pieces) + RESERVED_BYTES)
        return max(1, min(room, REGISTERS // (FEWEST_REGISTERS * self.warps * WARP)))

    def fits(self, kind: Kind, x_pieces: int, target: Target) -> bool:
        """Whether there is such a kernel."""
        row_tiles = self.rows // STEP
        if kind.rows_of_head % self.rows or self.rows % STEP or self.warps % self.token_tiles or self.warps % row_tiles:
            return False
        of_rows, of_terms = self.warps // self.token_tiles, self.warps // row_tiles
        whole = self.rows % (of_rows * STEP) == 0 and kind.terms % (of_terms * STEP) == 0 and kind.terms // of_terms <= MOST_TERMS
        return whole and self.rows in LINES and self.shared_bytes(kind, x_pieces) <= target.shared_bytes_per_block


# In the order in which they are preferred among those that keep as many multiprocessors busy.
SCHEDULES = tuple(ChunkSchedule(chunk=chunk, rows=rows, warps=warps) for chunk, rows, warps in (
    (64, 32, 8), (64, 32, 4), (64, 64, 8), (64, 16, 4), (32, 32, 4), (32, 16, 2), (32, 64, 8)))


def is_chunked(kind: Kind) -> bool:
    """Whether heads decay as one and nothing else is asked of a kernel."""
    return not kind.is_delta and not kind.decay_of_terms and kind.rates_each <= 1 and kind.terms in LINES and kind.rows_of_head % STEP == 0


def schedule_for(kind: Kind, all_rows: int, x_pieces: int, target: Target) -> ChunkSchedule | None:
    """The one whose busiest multiprocessor has the least to do: rows, and what each block does for itself. None: none fits."""
    found = [one for one in SCHEDULES if one.fits(kind, x_pieces, target)]
    return min(found, key=lambda one: -(-(all_rows // one.rows) // target.sm_count) * (one.rows + STEP)) if found else None


def source(dtype: DType, kind: Kind, schedule: ChunkSchedule, blocks: int = 1) -> StepSource:
    """Both kernels of one kind and schedule for x of ``dtype``; grids and scalars are those of a call. ``blocks``: of a multiprocessor."""
    x_pieces = PIECES_OF_X[dtype]

    def arguments(names: tuple[tuple[str, ...], ...], types: dict[str, DType]) -> tuple[KernelArgument, ...]:
        given = (pointer(name, Role.INPUT, types.get(name, DType.F32)) for name in names[0])
        made = (pointer(name, Role.OUTPUT, types.get(name, DType.F32), Access.WRITE) for name in names[1])
        return (*given, *made, *(i32(name, 0) for name in names[2]))

    launches = (
        Launch(entry="products", grid=(1, 1, 1), block=(schedule.token_tiles * WARP, 1, 1), pdl=True,
               arguments=arguments(PRODUCTS, {**TYPES, "x": dtype})),
        Launch(entry="scan_chunks", grid=(1, 1, 1), block=(schedule.warps * WARP, 1, 1), pdl=True,
               shared_bytes=schedule.shared_bytes(kind, x_pieces), arguments=arguments(SCAN, {**TYPES, "x": DType.BF16})),
    )
    plan = {"X": c_type(dtype), "x_pieces": x_pieces, "chunk": schedule.chunk, "rows": schedule.rows, "warps": schedule.warps,
            "blocks": blocks, "terms": kind.terms, "rows_of_head": kind.rows_of_head, "rows_of_group": kind.rows_of_group,
            "rates_each": kind.rates_each, "is_scaled": kind.is_scaled}
    return make_source(TEMPLATE, plan=plan, launches=launches)


def pieces_of_x(call: "RecurrenceCall") -> int:
    """By its type."""
    return PIECES_OF_X[DType(str(call.x.dtype).removeprefix("torch."))]


@frozen(kw_only=True)
class Scan:
    """What both kernels are given for one call: tensors by name, blocks and scalars of each."""

    tensors: "dict[str, torch.Tensor | None]"
    blocks: tuple[int, int]
    scalars: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, call: "RecurrenceCall", out: "tuple[torch.Tensor, torch.Tensor]", schedule: ChunkSchedule) -> "Scan":
        """With room for what lies between the kernels. Where x is not bf16, the second one reads its pieces."""
        import torch

        tokens, groups, terms = call.keys.shape[1:]
        all_rows, tiles, x_pieces = rows_of(call), -(-tokens // STEP), pieces_of_x(call)
        of_keys, of_queries = (call.x.new_empty((MOST_PIECES, groups, tokens, terms), dtype=torch.bfloat16) for _ in range(2))
        own = call.x.new_empty((x_pieces, tokens, all_rows), dtype=torch.bfloat16) if x_pieces > 1 else None
        tensors = {"state": call.state, "decay": call.decay, "x": call.x, "keys": call.keys, "queries": call.queries, "rates": call.rates,
                   "valid": call.valid, "skip": call.skip, "key_pieces": of_keys, "query_pieces": of_queries, "own_pieces": own,
                   "of_keys": call.decay.new_empty((tiles, groups, schedule.token_tiles, 2, WARP, 4)),
                   "counts": call.x.new_empty((tiles, groups), dtype=torch.int32), "y": out[0], "last": out[1]}
        products = (tokens, groups, all_rows, call.x.stride(1), row_step(call), *call.keys.stride()[1:3], *call.queries.stride()[1:3])
        scan = (tokens, groups, all_rows, *state_steps(call), call.x.stride(1) if own is None else all_rows, *call.decay.stride()[1:3])
        return cls(tensors=tensors, blocks=(tiles * groups, all_rows // schedule.rows), scalars=(products, scan))

    def of_launch(self, index: int) -> "tuple[torch.Tensor | None, ...]":
        """Tensors of a launch in its kernel's order."""
        names = (*PRODUCTS[0], *PRODUCTS[1]) if index == 0 else (*SCAN[0], *SCAN[1])
        own = self.tensors["own_pieces"]
        return tuple(own if index and name == "x" and own is not None else self.tensors[name] for name in names)


class ScanChunks:
    """The kernels, which ``backend`` builds for the target that is live on first use."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None]) -> None:
        self._backend, self._target = backend, target
        self._made: dict[tuple[Kind, int, torch.dtype, torch.device], tuple[OwnKernels, ChunkSchedule] | None] = {}
        self._lock = threading.Lock()

    def laid(self, call: "RecurrenceCall") -> "tuple[RecurrenceCall, Kind] | None":
        """``call`` with what is where the kernels read it, copies where need be; None: they do not serve such a call."""
        import torch

        if call.x.dim() != 4 or call.x.shape[0] != 1 or call.x.shape[1] < FEWEST_TOKENS or not call.x.numel():
            return None
        if any(one.dtype is not torch.float32 for one in call.wide) or call.x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return None
        kind = Kind.of(call)
        if not is_chunked(kind) or self._of(call, kind) is None or not has_known_state(call):
            return None
        if any(one.shape[1] * one.stride(1) > MOST_ELEMENTS for one in (call.x, call.keys, call.queries, call.decay)):
            return None
        x = call.x
        is_plain = x.stride(2) == kind.rows_of_head * x.stride(3)
        if x.dtype is torch.bfloat16:  # copied by 16 bytes
            is_plain = is_plain and x.stride(3) == 1 and x.stride(1) * PIECE_BYTES % VECTOR_BYTES == 0 and x.data_ptr() % VECTOR_BYTES == 0
        return evolve(call, x=x if is_plain else dense_copy(x), keys=in_quads(call.keys), queries=in_quads(call.queries),
                      rates=None if call.rates is None else call.rates.contiguous(),
                      skip=None if call.skip is None else call.skip.contiguous()), kind

    def __call__(self, call: "RecurrenceCall", out: "tuple[torch.Tensor, torch.Tensor]") -> None:
        """Write to ``out`` what ``agentcompile.recurrence`` makes of ``call``, as RecurrentRows does.

        Raises:
            BuildError: the device has no preset, or nothing builds the kernels.
        """
        made = self._of(call, Kind.of(call))
        assert made is not None
        kernels, schedule = made
        scan = Scan.of(call, out, schedule)
        for index, launch in enumerate(kernels.launches(call.x)):
            kernels.run(call.x, launch, scan.blocks[index], scan.of_launch(index), scan.scalars[index])

    def _of(self, call: "RecurrenceCall", kind: Kind) -> tuple[OwnKernels, ChunkSchedule] | None:
        """The kernels of a call, looked for once; None: no block will do, or nothing is known of the device yet."""
        key = (kind, rows_of(call), call.x.dtype, call.x.device)
        with self._lock:
            if key not in self._made:
                target = self._target()
                if target is None:
                    return None
                x_pieces = pieces_of_x(call)
                schedule = schedule_for(kind, rows_of(call), x_pieces, target)
                self._made[key] = None if schedule is None else (OwnKernels(self._backend, self._target, partial(
                    source, kind=kind, schedule=schedule, blocks=schedule.blocks(kind, x_pieces, target))), schedule)
            return self._made[key]
