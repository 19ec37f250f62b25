"""Recurrences over tokens, ``agentcompile.recurrence``, by the kernel of ``recurrence.cu``: the state stays in registers."""

import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from agentcompile_cuda_kit import c_type, make_source
from attrs import evolve, frozen

from agentcompile_core.plugin_api import Access, Backend, DType, Launch, Role, StepSource, Target, i32, pointer

from .own_kernels import OwnKernels

if TYPE_CHECKING:
    import torch

    from agentcompile_core.plugin_api import RecurrenceCall

TEMPLATE = Path(__file__).with_name("recurrence.cu")
WARP, QUAD, FLOAT_BYTES = 32, 4, 4
MOST_THREADS, MOST_EACH = 512, 32
STAGES = 2
# Threads of a block and tokens of a tile; terms that a thread holds of a row of up to MANY, and of a longer one (measured on an H100).
FEWEST_THREADS, THREADS, TILE = 128, 320, 16
MANY, FEW_EACH, FEWEST_OF_MANY, MANY_EACH = 32, 4, 8, 16
SCALARS = ("tokens", "all_rows", "state_row", "state_term", "x_token", "x_row", "decay_token", "decay_head", "strength_token",
           "strength_head", "key_token", "key_group", "query_token", "query_group")
ORDER = ("state", "decay", "x", "keys", "queries", "rates", "strength", "valid", "skip")


def scalars_of(call: "RecurrenceCall") -> tuple[int, ...]:
    """What the kernel is told beside its pointers."""
    of_strength = (0, 0) if call.strength is None else call.strength.stride()[1:3]
    return (call.x.shape[1], rows_of(call), *state_steps(call), call.x.stride(1), row_step(call), *call.decay.stride()[1:3], *of_strength,
            *call.keys.stride()[1:3], *call.queries.stride()[1:3])


def has_known_state(call: "RecurrenceCall") -> bool:
    """Whether the first state lies head by head, by rows or by terms, or there is none."""
    if call.state is None:
        return True
    _, _, width, terms = call.state_shape
    return call.state.stride(1) == width * terms and set(call.state.stride()[2:]) in ({1, terms}, {1, width})


def state_steps(call: "RecurrenceCall") -> tuple[int, ...]:
    """Elements from a row of the states to the next one, and from a term."""
    return (call.keys.shape[3], 1) if call.state is None else call.state.stride()[2:]


def row_step(call: "RecurrenceCall") -> int:
    """Elements from a row of x to the next one."""
    return call.x.stride(3) if call.x.shape[3] > 1 else call.x.stride(2)


def rows_of(call: "RecurrenceCall") -> int:
    """Of the states of all heads."""
    return call.x.shape[2] * call.x.shape[3]


def tensors_of(call: "RecurrenceCall") -> "tuple[torch.Tensor | None, ...]":
    """In the order of the kernel."""
    return call.state, call.decay, call.x, call.keys, call.queries, call.rates, call.strength, call.valid, call.skip


@frozen(kw_only=True)
class Kind:
    """What a kernel is made for: terms of a row of the state, rows of a head and of a group of heads that share keys, and whose decay."""

    terms: int
    rows_of_head: int
    rows_of_group: int
    rates_each: int = 0  # rates of a head: none, one or as many as it has terms
    decay_of_terms: bool = False
    is_delta: bool = False
    is_scaled: bool = False

    @classmethod
    def of(cls, call: "RecurrenceCall") -> "Kind":
        """That of a call."""
        heads, width = call.x.shape[2:]
        return cls(terms=call.keys.shape[3], rows_of_head=width, rows_of_group=heads // call.keys.shape[2] * width,
                   rates_each=0 if call.rates is None else call.rates.shape[1], decay_of_terms=call.decay.dim() == 4,
                   is_delta=call.strength is not None, is_scaled=call.scaled)


@frozen(kw_only=True)
class Schedule:
    """Threads of a row of the state, rows of a block and of a thread, and tokens of a tile."""

    lanes: int
    rows: int
    held: int
    tile: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.rows // self.held * self.lanes

    def shared_bytes(self, kind: Kind) -> int:
        """Both stages."""
        lines = (2 + kind.decay_of_terms) * self.tile + (0 if kind.decay_of_terms else 1)
        values = 3 * self.tile + (self.tile if kind.is_delta else 1)
        stage = FLOAT_BYTES * (lines * kind.terms + values * self.rows)
        return STAGES * -(-stage // 16) * 16


def schedule_for(kind: Kind, all_rows: int, target: Target) -> Schedule | None:
    """Rows of a block so that the busiest multiprocessor has as few as may be, by blocks of about as many threads as was fastest.

    None: no block will do.
    """
    least, most = (QUAD, FEW_EACH) if kind.terms <= MANY else (FEWEST_OF_MANY, MANY_EACH)
    whole = kind.rows_of_head if kind.decay_of_terms else kind.rows_of_group
    found = []
    for lanes, held in product((1, 2, 4, 8, 16, 32), (1, 2, 4)):
        each = kind.terms // lanes
        halves = lanes < WARP and kind.terms % (2 * QUAD * lanes) == 0 and each // 2 >= least  # more lanes will do
        if kind.terms % (QUAD * lanes) or not least <= each <= MOST_EACH or (each > most and halves):
            continue
        for rows in range(held, MOST_THREADS // lanes * held + 1, held):
            one = Schedule(lanes=lanes, rows=rows, held=held, tile=TILE)
            if whole % rows == 0 and one.threads % WARP == 0 and one.shared_bytes(kind) <= target.shared_bytes_per_block:
                busiest = -(-(all_rows // rows) // target.sm_count) * rows
                found.append(((one.threads < FEWEST_THREADS, busiest, abs(one.threads - THREADS), each, -rows), one))
    return min(found, key=lambda one: one[0])[1] if found else None


def source(dtype: DType, kind: Kind, schedule: Schedule) -> StepSource:
    """The kernel of one kind and schedule for x of ``dtype``; grid and scalars are those of a call."""
    types = {"valid": DType.I64, "x": dtype}
    given = (pointer(name, Role.INPUT, types.get(name, DType.F32)) for name in ORDER)
    made = (pointer(name, Role.OUTPUT, DType.F32, Access.WRITE) for name in ("y", "last"))
    launch = Launch(entry="recurrence", grid=(1, 1, 1), block=(schedule.threads, 1, 1), shared_bytes=schedule.shared_bytes(kind), pdl=True,
                    arguments=(*given, *made, *(i32(name, 0) for name in SCALARS)))
    plan = {"X": c_type(dtype), "threads": schedule.threads, "lanes": schedule.lanes, "rows": schedule.rows, "held": schedule.held,
            "tile": schedule.tile, "terms": kind.terms, "rows_of_head": kind.rows_of_head, "rows_of_group": kind.rows_of_group,
            "rates_each": kind.rates_each, "decay_of_terms": kind.decay_of_terms, "is_delta": kind.is_delta, "is_scaled": kind.is_scaled}
    return make_source(TEMPLATE, plan=plan, launches=(launch,))


class RecurrentRows:
    """The kernels, which ``backend`` builds for the target that is live on first use."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None]) -> None:
        self._backend, self._target = backend, target
        self._made: dict[tuple[Kind, int, torch.device], tuple[OwnKernels, Schedule] | None] = {}  # by kind, rows and device
        self._lock = threading.Lock()

    def laid(self, call: "RecurrenceCall") -> "tuple[RecurrenceCall, Kind] | None":
        """``call`` with what is where the kernel reads it, copies where need be; None: no kernel serves such a call."""
        import torch

        if call.x.dim() != 4 or call.x.shape[0] != 1 or not call.x.numel() or any(one.dtype is not torch.float32 for one in call.wide):
            return None
        kind = Kind.of(call)
        if call.x.dtype is torch.float64 or self._of(call, kind) is None:
            return None
        if not has_known_state(call):
            return None
        width = kind.rows_of_head
        is_plain = width == 1 or call.x.stride(2) == width * call.x.stride(3)
        return evolve(
            call, x=call.x if is_plain else call.x.contiguous(), keys=in_quads(call.keys), queries=in_quads(call.queries),
            decay=in_quads(call.decay) if kind.decay_of_terms else call.decay,
            rates=None if call.rates is None else call.rates.contiguous(), skip=None if call.skip is None else call.skip.contiguous(),
        ), kind

    def __call__(self, call: "RecurrenceCall", out: "tuple[torch.Tensor, torch.Tensor]") -> None:
        """Write to ``out`` what ``agentcompile.recurrence`` makes of ``call``.

        That is y [1, T, H, P], dense, and the last state [1, H, P, N], which lies as the first one.

        Raises:
            BuildError: the device has no preset, or nothing builds the kernel.
        """
        made = self._of(call, Kind.of(call))
        assert made is not None
        kernels, schedule = made
        kernels.run(call.x, kernels.launches(call.x)[0], rows_of(call) // schedule.rows, (*tensors_of(call), *out), scalars_of(call))

    def _of(self, call: "RecurrenceCall", kind: Kind) -> tuple[OwnKernels, Schedule] | None:
        """The kernel of a call, looked for once; None: no block will do, or nothing is known of the device yet."""
        key = (kind, rows_of(call), call.x.device)
        with self._lock:
            if key not in self._made:
                target = self._target()
                if target is None:
                    return None
                schedule = schedule_for(kind, rows_of(call), target)
                self._made[key] = None if schedule is None else (
                    OwnKernels(self._backend, self._target, partial(source, kind=kind, schedule=schedule)), schedule)
            return self._made[key]


def in_quads(lines: "torch.Tensor") -> "torch.Tensor":
    """``lines`` [1, T, G, N], or a copy, whose lines are whole quads side by side."""
    whole = lines.stride(3) == 1 and not any(stride % QUAD for stride in lines.stride()[1:3]) and lines.data_ptr() % 16 == 0
    return lines if whole else dense_copy(lines)


def dense_copy(x: "torch.Tensor") -> "torch.Tensor":
    """A copy side by side, at an address of its own: ``contiguous`` may give what lies so already, wherever it begins."""
    import torch

    return x.clone(memory_format=torch.contiguous_format)
