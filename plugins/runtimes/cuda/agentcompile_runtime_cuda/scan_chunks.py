"""Scans (Mamba-2) and delta rules whose heads decay as one, many tokens at a time by the tensor cores of ``scan_chunks.cu``."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentcompile_cuda_kit import c_type, make_source
from attrs import evolve, frozen

from agentcompile_core.plugin_api import Access, Backend, DType, KernelArgument, Launch, Role, StepSource, Target, i32, pointer

from .own_kernels import OwnKernels
from .recurrent_rows import ORDER, Kind, has_known_state, in_quads, rows_of

if TYPE_CHECKING:
    import torch

    from agentcompile_core.plugin_api import RecurrenceCall
TEMPLATE = Path(__file__).with_name("scan_chunks.cu")
WARP, STEP, MOST_PIECES, REGISTERS, FEWEST_REGISTERS = 32, 16, 3, 65536, 200
RESERVED_BYTES = 1024  # of each block's shared memory
VECTOR_BYTES = 16
PIECE_BYTES, FLOAT_BYTES = 2, 4
MOST_TERMS, MOST_ROWS_OF_DELTA = 64, 32  # of 16 rows that a warp keeps; of a block: more would not stay in registers
# Tokens of a call from which on chunks win (H100, 1024 tokens of a layer, us, chunks and token by token: Mamba2-2.7B 89 and 202, Falcon-H1
# 82 and 168; 128: 20 and 26, 21 and 24). Delta rules have inverses to make: Qwen3-Next at 128 45 and 31, at 512 92 and 113, at 1024 157 and
# 241, with queries and keys that are no bf16 numbers 240 and 241 there.
FEWEST_TOKENS, FEWEST_OF_DELTA = 64, 1024
PIECES_OF_X = {DType.BF16: 1, DType.F16: 2, DType.F32: 3}
LINES = (16, 32, 64, 128, 256)  # terms and rows of a block whose lines lie permuted
# Of each kernel: what it is given, what it makes, and scalars.
PRODUCTS = (("keys", "queries", "x", "valid"), ("key_pieces", "query_pieces", "own_pieces", "of_keys", "of_pairs", "counts"),
            ("tokens", "groups", "all_rows", "x_token", "x_row", "key_token", "key_group", "query_token", "query_group"))
INVERSES = (("decay", "rates", "strength", "valid", "of_pairs"), ("inverses",),
            ("tokens", "groups", "heads", "decay_token", "decay_head", "strength_token", "strength_head"))
SCAN = (("state", "decay", "x", "rates", "valid", "skip", "key_pieces", "query_pieces", "of_keys", "counts", "inverses"), ("y", "last"),
        ("tokens", "groups", "all_rows", "state_row", "state_term", "x_token", "decay_token", "decay_head"))
TYPES = {"valid": DType.I64, "key_pieces": DType.BF16, "query_pieces": DType.BF16, "own_pieces": DType.BF16, "counts": DType.I32,
         "inverses": DType.I32}


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
        of_delta = MOST_PIECES * self.chunk * self.rows if kind.is_delta else 8
        return slots + own + (MOST_PIECES * self.rows * kind.terms + 2 * of_delta) * PIECE_BYTES

    def inverse_bytes(self) -> int:
        """Shared memory in which the inverse of one head and chunk is made."""
        return (self.chunk * (self.chunk + 4) + self.chunk * 4 + 4) * FLOAT_BYTES

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
        whole = self.rows % (of_rows * STEP) == 0 and kind.terms % (of_terms * STEP) == 0
        is_held = kind.terms // of_terms <= MOST_TERMS and not (kind.is_delta and self.rows > MOST_ROWS_OF_DELTA)
        return whole and is_held and self.rows in LINES and self.shared_bytes(kind, x_pieces) <= target.shared_bytes_per_block


# In the order in which they are preferred among those that keep as many multiprocessors busy.
SCHEDULES = tuple(ChunkSchedule(chunk=chunk, rows=rows, warps=warps) for chunk, rows, warps in (
    (64, 32, 8), (64, 32, 4), (64, 64, 8), (64, 16, 4), (32, 32, 4), (32, 16, 2), (32, 64, 8)))


def is_chunked(kind: Kind) -> bool:
    """Whether heads decay as one, and nothing scales what a delta rule adds."""
    as_one = not kind.decay_of_terms and kind.rates_each <= 1 and not (kind.is_delta and kind.is_scaled)
    return as_one and kind.terms in LINES and kind.rows_of_head % STEP == 0


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

    inverses = () if not kind.is_delta else (
        Launch(entry="inverses", grid=(1, 1, 1), block=(max(WARP, schedule.chunk), 1, 1), pdl=True, shared_bytes=schedule.inverse_bytes(),
               arguments=arguments(INVERSES, TYPES)),)
    launches = (
        Launch(entry="products", grid=(1, 1, 1), block=(schedule.token_tiles * WARP, 1, 1), pdl=True,
               arguments=arguments(PRODUCTS, {**TYPES, "x": dtype})),
        *inverses,
        Launch(entry="scan_chunks", grid=(1, 1, 1), block=(schedule.warps * WARP, 1, 1), pdl=True,
               shared_bytes=schedule.shared_bytes(kind, x_pieces), arguments=arguments(SCAN, {**TYPES, "x": DType.BF16})),
    )
    plan = {"X": c_type(dtype), "x_pieces": x_pieces, "chunk": schedule.chunk, "rows": schedule.rows, "warps": schedule.warps,
            "blocks": blocks, "terms": kind.terms, "rows_of_head": kind.rows_of_head, "rows_of_group": kind.rows_of_group,
            "rates_each": kind.rates_each, "is_scaled": kind.is_scaled, "is_delta": kind.is_delta}
    return make_source(TEMPLATE, plan=plan, launches=launches)


def row_step(call: "RecurrenceCall") -> int:
    """Elements from a row of x to the next one."""
    return call.x.stride(3) if call.x.shape[3] > 1 else call.x.stride(2)


@frozen(kw_only=True)
class Scan:
    """What the kernels are given for one call: tensors by name, and of each its names, blocks and scalars."""

    tensors: "dict[str, torch.Tensor | None]"
    names: tuple[tuple[str, ...], ...]
    blocks: tuple[int, ...]
    scalars: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, call: "RecurrenceCall", out: "tuple[torch.Tensor, torch.Tensor]", schedule: ChunkSchedule) -> "Scan":
        """With room for what lies between the kernels. Where x is not bf16, the last one reads its pieces."""
        import torch

        tokens, groups, terms = call.keys.shape[1:]
        heads, all_rows, tiles = call.x.shape[2], rows_of(call), -(-tokens // STEP)
        x_pieces = PIECES_OF_X[DType(str(call.x.dtype).removeprefix("torch."))]
        made = {"key_pieces": (MOST_PIECES, groups, tokens, terms), "query_pieces": (MOST_PIECES, groups, tokens, terms),
                "of_keys": (tiles, groups, schedule.token_tiles, 2, WARP, 4), "counts": (tiles, groups, 2)}
        if x_pieces > 1:
            made["own_pieces"] = x_pieces, tokens, all_rows
        if call.strength is not None:
            made["of_pairs"] = made["of_keys"]
            chunks, of_chunk = -(-tokens // schedule.chunk), schedule.token_tiles
            made["inverses"] = chunks, heads, of_chunk, of_chunk, MOST_PIECES, WARP, 4
        types = {DType.BF16: torch.bfloat16, DType.I32: torch.int32, DType.F32: torch.float32}
        between = {name: call.x.new_empty(size, dtype=types[TYPES.get(name, DType.F32)]) for name, size in made.items()}
        tensors = {**{name: getattr(call, name) for name in ORDER}, "own_pieces": None, "of_pairs": None, "inverses": None, **between,
                   "y": out[0], "last": out[1]}
        of_state = (terms, 1) if call.state is None else call.state.stride()[2:]
        of_decay, x_token = call.decay.stride()[1:3], call.x.stride(1)
        kernels = [((*PRODUCTS[0], *PRODUCTS[1]), tiles * groups,
                    (tokens, groups, all_rows, x_token, row_step(call), *call.keys.stride()[1:3], *call.queries.stride()[1:3]))]
        if call.strength is not None:
            kernels.append(((*INVERSES[0], *INVERSES[1]), chunks * heads,
                            (tokens, groups, heads, *of_decay, *call.strength.stride()[1:3])))
        names = ("own_pieces" if name == "x" and x_pieces > 1 else name for name in (*SCAN[0], *SCAN[1]))
        kernels.append(((*names,), all_rows // schedule.rows,
                        (tokens, groups, all_rows, *of_state, all_rows if x_pieces > 1 else x_token, *of_decay)))
        return cls(tensors=tensors, names=tuple(one[0] for one in kernels), blocks=tuple(one[1] for one in kernels),
                   scalars=tuple(one[2] for one in kernels))

    def of_launch(self, index: int) -> "tuple[torch.Tensor | None, ...]":
        """Tensors of a launch in its kernel's order."""
        return tuple(self.tensors[name] for name in self.names[index])


class ScanChunks:
    """The kernels, which ``backend`` builds for the target that is live on first use."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None]) -> None:
        self._backend, self._target = backend, target
        self._made: dict[tuple[Kind, int, torch.dtype, torch.device], tuple[OwnKernels, ChunkSchedule] | None] = {}
        self._lock = threading.Lock()

    def laid(self, call: "RecurrenceCall") -> "tuple[RecurrenceCall, Kind] | None":
        """``call`` with what is where the kernels read it, copies where need be; None: they do not serve such a call."""
        import torch

        fewest = FEWEST_TOKENS if call.strength is None else FEWEST_OF_DELTA
        if call.x.dim() != 4 or call.x.shape[0] != 1 or call.x.shape[1] < fewest or not call.x.numel():
            return None
        if any(one.dtype is not torch.float32 for one in call.wide) or call.x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return None
        kind = Kind.of(call)
        if not is_chunked(kind) or self._of(call, kind) is None or not has_known_state(call):
            return None
        x = call.x
        is_plain = x.stride(2) == kind.rows_of_head * x.stride(3)
        if x.dtype is torch.bfloat16:  # copied by 16 bytes
            is_plain = is_plain and x.stride(3) == 1 and x.stride(1) * PIECE_BYTES % VECTOR_BYTES == 0 and x.data_ptr() % VECTOR_BYTES == 0
        return evolve(call, x=x if is_plain else x.contiguous(), keys=in_quads(call.keys), queries=in_quads(call.queries),
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
                x_pieces = PIECES_OF_X[DType(str(call.x.dtype).removeprefix("torch."))]
                schedule = schedule_for(kind, rows_of(call), x_pieces, target)
                self._made[key] = None if schedule is None else (OwnKernels(self._backend, self._target, partial(
                    source, kind=kind, schedule=schedule, blocks=schedule.blocks(kind, x_pieces, target))), schedule)
            return self._made[key]
