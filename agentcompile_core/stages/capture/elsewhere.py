"""Copies of plain modules on other devices: a graph says how results lie in memory, which a device decides."""

import copy
from collections.abc import Iterator

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...plugin.interfaces import LoadedModel
from .modules import LoadedModule

DEVICES = ("meta", "cpu")


def copies(loaded: LoadedModel) -> Iterator[LoadedModule]:
    """A plain module with its example inputs on each device of ``DEVICES`` where it is not; nothing of a language model, of whose graphs
    no device has a say, nor of what does not copy."""
    if not isinstance(loaded, LoadedModule):
        return
    tensors = [*loaded.module.parameters(), *loaded.module.buffers()]
    given = loaded.example_inputs, loaded.example_keywords
    here = {tensor.device.type for tensor in (*tensors, *(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)))}
    for device in DEVICES:
        if here == {device}:
            continue
        moved = {id(tensor): _on(tensor, device) for tensor in tensors}
        try:
            module = copy.deepcopy(loaded.module, moved)
        except Exception:  # whatever a module holds
            return
        inputs, keywords = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), given)  # noqa: B023
        made = LoadedModule(module=module, name=loaded.name, example_inputs=inputs, example_keywords=keywords)
        made.path = loaded.path
        yield made


def _on(tensor: Tensor, device: str) -> Tensor:
    there = tensor.detach().to(device)
    return nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there
