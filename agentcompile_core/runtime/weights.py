"""The one owner of a model's parameters and buffers on the device."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING

from ..errors import ContractError, UsageError
from ..ir.extents import span
from ..ir.weight_source import parameter_of
from .module_changes import AsBound, place

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

SMALL_BYTES = 10 << 20  # below this, torch's allocator puts several tensors into one segment
VECTOR_BYTES = 16  # kernels read weights in vectors of this size
ALIGNMENT_BYTES = 256
_REQUIRES_GRAD = attrgetter("requires_grad")


class WeightStore:
    """Parameters and buffers by qualified name, one copy, shared by every program and by the original module.

    Siblings that a step reads as one matrix (Q/K/V, gate/up) are concatenated once; the original Parameters become row
    slices of the concatenation, so the framework and the model itself read the same bytes. Tied parameters stay tied.
    Where steps read the transposition of a parameter, it is laid out by columns: of the same shape and values, in other strides.
    Names are sources of a graph's weights (see ``ir.weight_source``).
    """

    def __init__(self, module: "torch.nn.Module", device: str) -> None:
        import torch

        self.device = device
        meta = next((name for name, p in module.named_parameters() if p.is_meta), None)
        if meta is not None:
            raise UsageError(
                f"parameter {meta} holds no data (the model was captured without weights); load the model with its weights to run it"
            )
        self._module: torch.nn.Module | None = module
        self._as_bound: AsBound | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._own: set[str] = set()
        self._groups: dict[tuple[str, ...], torch.Tensor] = {}
        self._group_of: dict[str, tuple[str, ...]] = {}  # by the name of the parameter
        self._by_columns: dict[str, bool] = {}  # whether steps read the transposition; of parameters that steps read
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter.device != torch.device(device) and parameter.device.type != device:
                place(parameter, parameter.data.to(device))
            self._tensors[name] = parameter
        for name, buffer in module.named_buffers(remove_duplicate=False):
            self._tensors[name] = buffer if buffer.device.type == device else buffer.to(device)

    @classmethod
    def from_tensors(cls, tensors: "Mapping[str, torch.Tensor]", device: str) -> "WeightStore":
        """A store over plain tensors, without a module (synthetic weights of a worker)."""
        store = cls.__new__(cls)
        store.device = device
        store._tensors, store._own = dict(tensors), set()
        store._groups, store._group_of, store._by_columns = {}, {}, {}
        store._module = store._as_bound = None
        return store

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or parameter_of(name)[0] in self._tensors

    def tensor(self, name: str) -> "torch.Tensor":
        """The parameter or buffer called ``name``, or the transposition that it says, without gradient.

        Raises:
            UsageError: the model has none of that name.
        """
        if name in self._tensors:
            return self._tensors[name].detach()
        parameter, is_transposed = parameter_of(name)
        if parameter not in self._tensors or (is_transposed and self._tensors[parameter].dim() != 2):
            raise UsageError(f"the model has no parameter {parameter!r}; the program was compiled for another model")
        return self._tensors[parameter].detach().t()

    def own(self, name: str) -> "torch.Tensor":
        """The buffer called ``name``, from now on in memory of its own: what is written there changes programs, and not the module."""
        if name not in self._own:
            self._tensors[name] = self._tensors[name].detach().clone()
            self._own.add(name)
        return self._tensors[name]

    def learn(self) -> bool:
        """Whether a parameter or buffer asks for a gradient."""
        return any(map(_REQUIRES_GRAD, self._tensors.values()))

    def arrange(self, groups: Iterable[tuple[str, ...]]) -> None:
        """Lay out everything that steps read: concatenate ``groups``, align the rest to 16 bytes, and give back what that frees.

        Small parameters outside of groups are packed into one allocation first: they would keep the allocator's blocks
        alive in which the parts of the groups lay.

        Raises:
            ContractError: a name is part of two different groups, or a parameter is read both by rows and by columns.
        """
        import torch

        asked = list(dict.fromkeys(groups))
        wanted = [g for g in asked if len(g) > 1 and g not in self._groups]
        self._note_columns({name for g in asked for name in g})
        columns = {name for name, is_read in self._by_columns.items() if is_read}
        kept = {parameter_of(name)[0] for g in wanted for name in g} | set(self._group_of) | columns
        if wanted and self.device != "cpu":
            small = [n for n, t in self._tensors.items() if n not in kept and t.numel() * t.element_size() < SMALL_BYTES]
            self._pack([name for name in small if not lies_by_columns(self._tensors[name])])
        for names in wanted:
            self._concatenate(names)
            if self.device != "cpu":  # else the next one takes a part of what this one left, and the rest of that block stays empty
                torch.accelerator.empty_cache()
        for name, tensor in self._tensors.items():
            if tensor.layout is not torch.strided or tensor.is_quantized or name in self._group_of or not tensor.numel():
                continue  # no graph reads it, or it lies where it is read
            if name not in self._by_columns and lies_by_columns(tensor):
                continue  # where the steps of another session read it, and none of this one
            rows = tensor.detach().t() if name in columns else tensor.detach()
            if tensor.data_ptr() % VECTOR_BYTES or not rows.is_contiguous():
                rows = rows.clone(memory_format=torch.contiguous_format)
                place(tensor, rows.t() if name in columns else rows)

    def _note_columns(self, sources: set[str]) -> None:
        """Note which parameters are read by columns, under all names of a tied one."""
        said = {name: (False, name) if name in self._tensors else (True, parameter_of(name)[0]) for name in sorted(sources)}
        read = {id(self._tensors[parameter]): by_columns for by_columns, parameter in said.values() if parameter in self._tensors}
        known = {name: read[id(t)] for name, t in self._tensors.items() if id(t) in read} | self._by_columns
        both = next((parameter for by_columns, parameter in said.values() if known.get(parameter, by_columns) != by_columns), "")
        if both:
            raise ContractError(f"{both} is read by rows and by columns, and can be laid out for one of them")
        self._by_columns = known

    def _pack(self, names: list[str]) -> None:
        """Move parameters behind each other into one allocation; tied ones stay tied."""
        import torch

        by_storage: dict[int, list[str]] = {}
        for name in names:
            by_storage.setdefault(self._tensors[name].data_ptr(), []).append(name)
        sizes = {
            k: -(-self._tensors[v[0]].numel() * self._tensors[v[0]].element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            for k, v in by_storage.items()
        }
        pack = torch.empty(max(1, sum(sizes.values())), dtype=torch.uint8, device=self.device)
        offset = 0
        for key, tied in by_storage.items():
            first = self._tensors[tied[0]].detach()
            packed = pack[offset : offset + first.numel() * first.element_size()].view(first.dtype).view(first.shape)
            packed.copy_(first)
            for name in tied:
                place(self._tensors[name], packed)
            offset += sizes[key]

    def concatenated(self, names: tuple[str, ...]) -> "torch.Tensor":
        """The rows of ``names`` behind each other as one contiguous tensor; a single name is that tensor itself.

        Raises:
            ContractError: a name is already part of another concatenation.
        """
        if len(names) == 1:
            return self.tensor(names[0])
        return self._groups[names] if names in self._groups else self._concatenate(names)

    def _concatenate(self, names: tuple[str, ...]) -> "torch.Tensor":
        import torch

        parameters = [name if name in self._tensors else parameter_of(name)[0] for name in names]
        taken = [parameter for parameter in parameters if parameter in self._group_of]
        if taken:
            raise ContractError(f"{taken[0]} is already concatenated as {self._group_of[taken[0]]}, now wanted as {names}")
        parts = [self.tensor(name) for name in names]
        joined = torch.cat(parts, dim=0)
        for name, parameter, rows in zip(names, parameters, joined.split([part.shape[0] for part in parts]), strict=True):
            place(self._tensors[parameter], rows if name == parameter else rows.t())
            self._group_of[parameter] = names
        self._groups[names] = joined
        return joined

    def settle(self, *, with_mode: bool = False, forward: "Callable[[torch.nn.Module], object] | None" = None) -> None:
        """Everything is where programs read it from now on: ``check_unchanged`` looks at what became of the module since.

        ``with_mode`` and ``forward``: see ``AsBound``.
        """
        self._as_bound = AsBound(self._module, with_mode, forward) if self._module is not None else None

    def note_reads(self, call: "Callable[[AbstractContextManager[None]], object]", all_of_it: bool) -> None:
        """See ``AsBound.note_reads``; nothing where nothing was settled."""
        if self._as_bound is not None:
            self._as_bound.note_reads(call, all_of_it)

    def check_unchanged(self, name: str) -> None:
        """Do nothing where nothing was settled, or the module is the one whose programs these are.

        Raises:
            UsageError: something of it was replaced that programs do not follow.
        """
        if self._as_bound is not None and (change := self._as_bound.change()):
            raise UsageError(f"{change} after {name} was compiled, and its programs compute what it was then; "
                             "compile it again (weights may be changed in place: by load_state_dict or an optimizer)")

    def adopt(self) -> None:
        """The module itself ran, as its own library lets it: what it exchanged meanwhile is no change."""
        if self._as_bound is not None:
            self._as_bound.adopt()

    def overlap(self, module: "torch.nn.Module") -> str:
        """The name of a parameter or buffer of ``module`` that has memory in common with these; empty where none has."""
        ours = sorted(filter(None, map(_range, self._tensors.values())))
        starts = [start for start, _ in ours]
        furthest = list(accumulate((end for _, end in ours), max))
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found = _range(tensor)
            before = bisect_left(starts, found[1]) if found else 0
            if found and before and furthest[before - 1] > found[0]:
                return name
        return ""

    @property
    def nbytes(self) -> int:
        """Bytes of all distinct storages."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._tensors.values()}
        return sum(storages.values())


def lies_by_columns(tensor: "torch.Tensor") -> bool:
    """Whether it is a matrix of which only the transposition lies by rows, at an address that vectors begin at."""
    import torch

    return (tensor.layout is torch.strided and tensor.dim() == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous()
            and tensor.data_ptr() % VECTOR_BYTES == 0)


def _range(tensor: "torch.Tensor") -> tuple[int, int] | None:
    """Addresses from the first byte of a tensor to the one behind its last; None where it has none of its own."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.data_ptr() + span(tensor.shape, tensor.stride()) * tensor.element_size()
