"""What a captured graph depends on, as one digest: two models with the same identity compute the same thing.

It holds the code of every class in the module tree and of what it calls, attributes, hooks, overrides, names, shapes and
types of parameters and buffers and which of them are tied, the configuration, and the example inputs. Torch and
transformers count by what was changed in them at run time; their versions are part of the store's key.
"""

import hashlib
import inspect
import json
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from ...plugin.interfaces import LoadedModel
from . import libraries
from .code_digest import join
from .object_digest import Digests

# Keys of a configuration that say where it came from, not what it computes.
INCIDENTAL = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache", "auto_map")
# What loading leaves on modules, different for the same model with, without and with random weights.
_LEFT_BY_LOADING = frozenset({
    "_is_hf_initialized", "_use_kernels", "_weight_conversions", "generation_config", "name_or_path", "warnings_issued", "_tp_size",
    "_device_mesh", "hf_device_map", "model_tags",
})
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_OWN = frozenset({"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"})
SMALL_BUFFER = 4096
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "agentcompile")


@frozen(kw_only=True)
class Identity:
    """``model`` identifies a model on any device, with or without data; ``capture`` is what its graphs are stored under.

    ``unstable`` says why neither may stand for the model in the store; empty: they may.
    """

    model: str
    capture: str
    unstable: str = ""


def identity(loaded: LoadedModel) -> Identity:
    """Digest everything that the graphs of ``loaded`` depend on. Computes nothing and changes nothing; well under a second."""
    return identity_by(digested(loaded.module), loaded)


def identity_by(digests: Digests, loaded: LoadedModel) -> Identity:
    """The same by a walk that looked at its module just now."""
    root = loaded.module
    inputs = [_input(digests, (getattr(loaded, "example_inputs", ()), getattr(loaded, "example_keywords", {})))]
    parts = [digests.of(root), *_tensors(root), "inputs", *inputs, "hooks", *_global_hooks(digests), "changes", digests.changes()]
    model = join(*parts)
    capture = join(model, *_steering(root), _file(loaded))
    return Identity(model=model, capture=capture, unstable="; ".join(digests.unstable[:3]))


def digested(root: nn.Module) -> Digests:
    """A walk that looked at ``root`` and all that it and its code refer to."""
    registered = {id(part) for part in root.modules()}
    digests = Digests(lambda walk, module: _module(walk, module, id(module) in registered), _registered(root))
    digests.of(root)
    return digests


def _registered(root: nn.Module) -> dict[int, str]:
    """Names of all parameters and buffers by ``id``."""
    return {id(tensor): name for found in (root.named_buffers(), root.named_parameters()) for name, tensor in found}


def _module(digests: Digests, module: nn.Module, registered: bool) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return digests.give_up("it holds a module of TorchScript")
    attributes = vars(module)
    parts = [digests.klass(type(module))]
    for name in sorted(attributes):
        if name in _OWN or name in _LEFT_BY_LOADING or _is_hook_table(name):
            continue
        value = attributes[name]
        parts += [name, _config(digests, value) if isinstance(value, PretrainedConfig) else digests.of(value)]
    parts += _hooks(digests, attributes)
    for kind in ("_parameters", "_buffers"):
        for name, tensor in attributes[kind].items():
            # What hangs on no registered module becomes a constant of the graph, so its values count.
            parts += [kind, name, _spec(tensor) if registered or tensor is None else digests.tensor(tensor)]
    if not registered:
        parts.append(f"training={module.training}")  # capture reaches registered modules only when it switches to evaluation
    for name, child in attributes["_modules"].items():
        parts += ["module", name, digests.of(child)]
    return join("module", *parts)


def _is_hook_table(name: str) -> bool:
    return name.startswith(("_forward_", "_backward_", "_state_dict_", "_load_state_dict_")) and "hooks" in name


def _hooks(digests: Digests, attributes: dict[str, Any]) -> Iterator[str]:
    flags = [attributes.get(name, {}) for name in _HOOK_FLAGS]
    for table in _HOOKS:
        for key, hook in attributes.get(table, {}).items():
            yield join(table, digests.of(hook), *(str(key in flag) for flag in flags))


def _global_hooks(digests: Digests) -> Iterator[str]:
    for table in _HOOKS:
        yield from (digests.of(hook) for hook in getattr(nn.modules.module, f"_global{table}").values())


def _config(digests: Digests, config: PretrainedConfig) -> str:
    chosen = getattr(config, "_attn_implementation", None)
    functions = [table[chosen] for table in (AttentionInterface(), AttentionMaskInterface()) if isinstance(chosen, str) and chosen in table]
    own = [digests.of(function) for function in functions if not _is_librarys(function)]
    name = "" if chosen is None or chosen in ATTENTION else str(chosen)
    return join("config", digests.klass(type(config)), config_text(config, digests), name, *own)


def _is_librarys(function: Any) -> bool:
    """Whether the version of a library stands for a function: it was written there, and nothing of somebody else is around or within."""
    written = inspect.unwrap(function)
    return isinstance(written, FunctionType) and libraries.is_library_function(written) and not libraries.is_foreign(function)


def config_text(config: Any, digests: Digests | None = None) -> str:
    """The configuration as canonical JSON without what is incidental; ``{}`` where there is none."""
    facts = config.to_dict() if hasattr(config, "to_dict") else {}
    facts = {key: value for key, value in facts.items() if key not in INCIDENTAL}
    return json.dumps(facts, sort_keys=True, default=digests.of if digests else lambda value: type(value).__name__)


def _spec(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


def _tensors(root: nn.Module) -> Iterator[str]:
    """Names of all parameters and buffers with the first name of each: which are tied, and which buffers are saved."""
    first: dict[int, str] = {}
    for kind, found in (("p", root.named_parameters(remove_duplicate=False)), ("b", root.named_buffers(remove_duplicate=False))):
        for name, tensor in found:
            yield f"{kind} {name} {first.setdefault(id(tensor), name)} {_spec(tensor)}"


def _input(digests: Digests, value: Any) -> str:
    if isinstance(value, Tensor):
        return join("input", _spec(value), str(value.stride()) if value.layout is torch.strided else str(value.layout))
    if type(value) is dict:
        return join("dict", *(digests.of(key) + _input(digests, item) for key, item in value.items()))
    if isinstance(value, tuple | list):
        return join(type(value).__qualname__, *(_input(digests, item) for item in value))
    return digests.of(value)


def _steering(root: nn.Module) -> Iterator[str]:
    """What may steer Python code: small buffers of integers, and which parameters ask for gradients."""
    yield from (f"{name} asks for gradients" for name, parameter in root.named_parameters() if parameter.requires_grad)
    for name, buffer in root.named_buffers():
        if not buffer.is_meta and not buffer.is_floating_point() and 0 < buffer.numel() <= SMALL_BUFFER and not buffer.is_complex():
            yield f"{name} {buffer.detach().flatten().tolist()}"


def _file(loaded: LoadedModel) -> str:
    """The text of the file that a plain module was read from; "" where it was not."""
    path = loaded.path
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.suffix == ".py" and path.is_file() else ""
