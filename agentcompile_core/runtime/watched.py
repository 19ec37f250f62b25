"""What programs that were bound to a module rest on beside the values of its parameters, and how a change of each is called."""

import inspect
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

from .absent import absent, class_values

if TYPE_CHECKING:
    import torch

SET = "was set to something else"
ADDED = "was added"
REPLACED = "was replaced by another tensor"
EXCHANGEABLE = "was replaced by another buffer"  # what the forward of a module may exchange itself, as ``SET``
PATCHED = "was replaced by another function"
_PLAIN = (bool, int, float, complex, str, tuple, type(None), FunctionType, BuiltinFunctionType)
_NEVER_READ = ("_is_full_backward_hook", "forward")  # by a forward; ``forward`` is watched by itself
# What is written to a language model without a say in its logits: modes, names and marks of whoever loads and saves it.
_OF_THE_MODE = ("training", "gradient_checkpointing", "_is_hf_initialized", "name_or_path", "kernel_config", "loss_type")
_OF_THE_REQUEST = ("use_cache", "tie_word_embeddings")
_FRAMEWORK = ("torch.", "transformers.modeling_utils", "transformers.generation")  # of whose classes nobody watches more than ``forward``

Slot = tuple[dict[str, Any], str, str, str]  # whose, by which name, what it is called, and what is said where it is another one


def slots_of(module: "torch.nn.Module", with_mode: bool) -> list[Slot]:
    """All that is looked up by name. ``with_mode``: of a plain module, whose training mode has a say and which has no configuration."""
    from torch import Tensor

    slots: list[Slot] = []
    for path, part in module.named_modules():
        prefix, whole = f"{path}." if path else "", path or type(part).__name__
        slots += [(part._modules, name, prefix + name, "was replaced by another module") for name in part._modules]
        slots += [(part._parameters, name, prefix + name, REPLACED) for name in part._parameters]
        slots += [(part._buffers, name, prefix + name, EXCHANGEABLE) for name in part._buffers]
        left_out = _NEVER_READ if with_mode else (*_NEVER_READ, *_OF_THE_MODE)
        slots += [(part.__dict__, name, prefix + name, SET) for name, value in part.__dict__.items()
                  if isinstance(value, (*_PLAIN, Tensor)) and name not in left_out]
        said = {id(part.__dict__): SET, id(part._buffers): EXCHANGEABLE}
        slots += [(table, name, prefix + name, said.get(id(table), ADDED)) for table, name in absent(part) if name not in left_out]
        slots.append((part.__dict__, "forward", whole, "got another forward"))
    return slots if with_mode else [*slots, *_of_configurations(module), *_of_globals(module)]


def class_values_of(module: "torch.nn.Module") -> Iterator[tuple[type, str]]:
    """Classes of its parts and the names of plain values that those of one's own among them and their bases give to all objects."""
    for kind in {type(part): None for part in module.modules()}:
        yield from ((kind, name) for name in class_values(kind))


def functions_of(module: "torch.nn.Module") -> Iterator[tuple[type, str]]:
    """Classes of its parts and the names of their own methods, once each; of those of torch and transformers the ``forward`` alone."""
    for kind in {type(part): None for part in module.modules()}:
        own = {name for one in kind.__mro__ if not f"{one.__module__}.".startswith(_FRAMEWORK)
               for name, value in vars(one).items() if isinstance(value, FunctionType) and not name.startswith("__")
               and isinstance(getattr(kind, name, None), FunctionType)}  # else a class method overrides it, which is made anew each time
        yield from ((kind, name) for name in sorted(own | {"forward"}))


def _of_configurations(module: "torch.nn.Module") -> Iterator[Slot]:
    """Plain values of the configurations that its parts hold, and of what is within them; not what only says how requests are answered."""
    seen: set[int] = set()
    left_out: set[str] = set()

    def within(values: dict[Any, Any], path: str) -> Iterator[Slot]:
        if id(values) in seen:
            return
        seen.add(id(values))
        for name, value in values.items():
            if not isinstance(name, str) or name.startswith("_") or name.endswith("token_id") or name in left_out:
                continue
            if isinstance(value, _PLAIN):
                yield values, name, f"{path}.{name}", SET
            elif isinstance(value, dict) or _is_configuration(value):
                yield from within(value if isinstance(value, dict) else value.__dict__, f"{path}.{name}")

    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            if _is_configuration(value):
                from transformers import PreTrainedConfig

                left_out |= {*vars(PreTrainedConfig()), *_OF_THE_REQUEST}  # what all have says how results are returned, and of which type
                yield part.__dict__, name, f"{path}.{name}" if path else name, SET
                yield from within(value.__dict__, f"{path}.{name}" if path else name)


def _is_configuration(value: Any) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "to_dict") and not isinstance(value, type)


def _of_globals(module: "torch.nn.Module") -> Iterator[Slot]:
    """Functions of their modules that the methods of its parts name: speed-ups of others put their own in their place."""
    seen: set[tuple[int, str]] = set()
    for kind, method in functions_of(module):
        function = inspect.unwrap(getattr(kind, method))
        home = f"{function.__module__ or ''}." if isinstance(function, FunctionType) else "torch."  # code may have no name for its module
        if home.startswith("torch."):
            continue
        for name in function.__code__.co_names:
            if isinstance(function.__globals__.get(name), FunctionType) and (id(function.__globals__), name) not in seen:
                seen.add((id(function.__globals__), name))
                yield function.__globals__, name, f"{home}{name}".lstrip("."), PATCHED
