"""The memory of one trial: guarded buffers of all operands and workspaces, and whether they are still as they must be."""

from torch import Tensor

from ..ir.graph import DType, TensorSpec
from ..ir.region import PROMISED_BYTES, Operand, Role
from ..ir.verdict import Trial
from .memory import NAN_BYTE, Arena, Guarded, Unchanged, any_of

OUTPUT_GUARD = 0xA5
TOGETHER_BYTES = 4 << 20  # operands up to here share an allocation
GIVEN = (Role.INPUT, Role.WEIGHT, Role.CONSTANT, Role.STATE, Role.LENGTH)
READ_ONLY = (Role.INPUT, Role.WEIGHT, Role.CONSTANT, Role.LENGTH)


class Buffers:
    """Guarded buffers of all operands and workspaces of a trial; ``shift_bytes`` moves them to other addresses.

    ``misaligned``: operands begin at odd multiples of what the runtime promises, or only the one called ``alone``. What is only read
    lies in ``read``, large operands in an arena of their own; what may be written in ``written``.
    """

    def __init__(self, trial: Trial, device: str, poison: float = float("nan"), shift_bytes: int = 0, misaligned: bool = False,
                 alone: str = "") -> None:
        self.trial, self.device = trial, device
        off = {o.name for o in trial.match.operands if misaligned and alone in ("", o.name)}
        shifts = {o.name: _promised_bytes(o) if o.name in off else 0 for o in trial.match.operands}
        only_read = {o.name: o.spec for o in trial.match.operands if o.role in READ_ONLY}
        self.read = [Arena(group, device, NAN_BYTE, shift_bytes=shift_bytes, shifts=shifts) for group in _grouped(only_read)]
        rest = {o.name: o.spec for o in trial.match.operands if o.name not in only_read}
        self.written = Arena(rest, device, OUTPUT_GUARD, shift_bytes=shift_bytes, shifts=shifts)
        scratch = {w.name: TensorSpec(shape=(w.nbytes,), dtype=DType.U8) for w in trial.source.workspaces}
        self.scratch = Arena(scratch, device, OUTPUT_GUARD)
        found = {name: buffer for arena in (*self.read, self.written) for name, buffer in arena.buffers.items()}
        self.operands: dict[str, Guarded] = {operand.name: found[operand.name] for operand in trial.match.operands}
        self.workspaces: dict[str, Guarded] = self.scratch.buffers
        for tensor in self.tensors(Role.OUTPUT).values():
            fill(tensor, poison)
        for workspace in trial.source.workspaces:
            self.workspaces[workspace.name].tensor.fill_(0 if workspace.zeroed else 0xFF)

    def tensors(self, *roles: Role) -> dict[str, Tensor]:
        """Operand tensors with one of ``roles`` (none given: all)."""
        return {o.name: self.operands[o.name].tensor for o in self.trial.match.operands if not roles or o.role in roles}

    def fill_from(self, other: "Buffers") -> None:
        """Take over what the operands of ``other`` that are only read hold, guard bands included."""
        for mine, its in zip(self.read, other.read, strict=True):
            mine.content.copy_(its.content)

    @property
    def addresses(self) -> dict[str, int]:
        """Addresses of operands and workspaces by name."""
        return {name: buffer.address for name, buffer in (*self.operands.items(), *self.workspaces.items())}

    def damaged(self) -> list[str]:
        """Names of the buffers whose guard bands were written."""
        return [name for name, buffer in (*self.operands.items(), *self.workspaces.items()) if not buffer.intact]

    def bands_written(self) -> list[Tensor]:
        """Whether the guard bands of what may be written were written, as flags on the device."""
        return [arena.damaged() for arena in (self.written, self.scratch) if arena.buffers]


def _grouped(specs: dict[str, TensorSpec]) -> list[dict[str, TensorSpec]]:
    """What is small together, what is large alone."""
    small = {name: spec for name, spec in specs.items() if spec.nbytes <= TOGETHER_BYTES}
    return [group for group in (small, *({name: spec} for name, spec in specs.items() if name not in small)) if group]


def _promised_bytes(operand: Operand) -> int:
    return operand.spec.dtype.bytes if operand.is_ragged else PROMISED_BYTES


def fill(tensor: Tensor, poison: float) -> None:
    """Fill with a poison: as it is in floats, as an integer far out of range in integers."""
    if tensor.is_floating_point():
        tensor.fill_(poison)
    else:
        tensor.fill_(-77 if poison != poison else int(poison) - 1000)


class Watch:
    """Remembers buffers as they are before a run; ``like`` are buffers that hold the same in what is only read."""

    def __init__(self, buffers: Buffers, like: Buffers | None = None) -> None:
        self._buffers = buffers
        others = like.read if like is not None else [None] * len(buffers.read)
        self._kept = [Unchanged(mine, its) for mine, its in zip(buffers.read, others, strict=True)]

    def touched(self) -> dict[str, list[str]]:
        """What a run did that it may not, in words, with the names of the buffers. Where it did nothing, the device is waited for once."""
        buffers = self._buffers
        zeroed = {w.name: buffers.workspaces[w.name].tensor for w in buffers.trial.source.workspaces if w.zeroed}
        if not any_of((*buffers.bands_written(), *(kept.changed() for kept in self._kept), *(t.any() for t in zeroed.values()))):
            return {}
        found = {"wrote outside": buffers.damaged(), "changed": [name for kept in self._kept for name in kept.names()],
                 "workspace not zero again": [name for name, tensor in zeroed.items() if bool(tensor.any())]}
        return {what: names for what, names in found.items() if names}
