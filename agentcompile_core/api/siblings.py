"""The programs of one module over the parameters of another: what many equal layers share, each with weights of its own."""

import copy
from typing import TYPE_CHECKING

from attrs import evolve

from ..errors import UsageError
from ..installation import install
from ..plugin.interfaces import LoadedModel
from ..runtime.as_captured import as_captured
from ..runtime.device import at_any_length
from ..runtime.module_session import ModuleSession
from . import whole_calls
from .parts import Parts

if TYPE_CHECKING:
    import torch


def parts_over(parts: Parts, module: "torch.nn.Module") -> Parts:
    """``parts`` of a plain module that was compiled in this process, over the parameters of ``module``: no capture, search or build.

    Raises:
        UsageError: they are of no plain module with programs, or ``module`` differs in more than the values of its tensors, or has
            memory in common with one that these programs read already.
    """
    import torch

    compilation, session, ctx = parts.compilation, parts.session, parts.context
    if compilation is None or not isinstance(session, ModuleSession):
        raise UsageError(f"{parts.loaded.name} shares no programs: it is no plain module that was compiled in this process and captured; "
                         "save its bundle and load that with the other model")
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"{type(module).__name__} is no module; pass a torch.nn.Module like {parts.loaded.name}")
    loaded = copy.copy(parts.loaded)
    loaded.module, loaded.name = module, type(module).__name__
    with as_captured():
        why = _unequal(parts, loaded) or _shared(parts, module) or _differs(parts, loaded, session.device)
        if why:
            raise UsageError(f"{loaded.name} cannot run the programs that were compiled for {parts.loaded.name}: {why}; "
                             "compile it by itself")
        what = install.Runnable(graphs=parts.graphs, programs=compilation.programs, kernels=compilation.kernels,
                                provisional=compilation.provisional)
        made, notes = install.install(loaded, what, session.device, parts.run_on, ctx)
        notes = (*loaded.notes, *parts.graphs.notes, *notes, *whole_calls.as_in(session, made, loaded, ctx))
    parts.kin.update((session, made))
    return evolve(parts, loaded=loaded, session=made, notes=notes)


def _unequal(parts: Parts, loaded: LoadedModel) -> str:
    """How a module differs from the one that was compiled, without running it."""
    from torch.nn.parameter import is_lazy

    from ..stages.capture.describe import describe
    from ..stages.capture.identity import identity

    if any(map(is_lazy, (*loaded.module.parameters(), *loaded.module.buffers()))):
        return "its parameters have no shape yet"
    if not loaded.has_weights:
        return "its parameters hold no data"
    first, other = parts.identity, identity(loaded)
    if why := first.unstable or other.unstable:
        return f"nobody can tell whether they are equal ({why})"
    is_equal = first == other and describe(loaded, other).digest == parts.graphs.model.digest  # the first one may have changed since
    return "" if is_equal else "its code, its attributes, its integer buffers, or the shapes and types of its parameters are others"


def _shared(parts: Parts, module: "torch.nn.Module") -> str:
    """What programs read they may lay out anew: then another one would read where nothing lies any more."""
    for session in (parts.session, *parts.kin):
        name = session.weights.overlap(module) if isinstance(session, ModuleSession) else ""
        if name:
            return f"its {name} lies in memory that they read already"
    return ""


def _differs(parts: Parts, loaded: LoadedModel, device: str) -> str:
    """How a module that is put on the device computes something else; then it is where it was."""
    from ..stages.capture.comparison import difference
    from ..stages.capture.dependence import training_matters

    places = {tensor.device for tensor in (*loaded.module.parameters(), *loaded.module.buffers())}
    loaded.module.to(device)
    with at_any_length(parts.context.backend):
        why = training_matters(loaded) or difference(parts.graphs, loaded)
    if why and len(places) == 1:
        loaded.module.to(places.pop())
    return why
