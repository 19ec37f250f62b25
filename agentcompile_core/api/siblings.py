"""The programs of one module over the parameters of another: what many equal layers share, each with weights of its own."""

import copy
from typing import TYPE_CHECKING

from attrs import evolve

from ..errors import UsageError
from ..installation import install
from ..ir.graph import GraphSet
from ..plugin.interfaces import LoadedModel
from ..runtime.module_session import ModuleSession
from . import whole_calls
from .parts import Parts

if TYPE_CHECKING:
    import torch


def parts_over(parts: Parts, module: "torch.nn.Module") -> Parts:
    """``parts`` of a plain module that was compiled in this process, over the parameters of ``module``: no capture, search or build.

    Raises:
        UsageError: they are of no plain module with programs, or ``module`` differs in more than the values of its tensors.
    """
    compilation, session, ctx = parts.compilation, parts.session, parts.context
    if compilation is None or not isinstance(session, ModuleSession):
        raise UsageError(f"{parts.loaded.name} shares no programs: it is no plain module that was compiled in this process and captured; "
                         "save its bundle and load that with the other model")
    loaded = copy.copy(parts.loaded)
    loaded.module, loaded.name = module, type(module).__name__
    _check_equal(parts.graphs, loaded, session.device)
    what = install.Runnable(graphs=parts.graphs, programs=compilation.programs, kernels=compilation.kernels,
                            provisional=compilation.provisional)
    made, notes = install.install(loaded, what, session.device, parts.run_on, ctx)
    notes = (*notes, *whole_calls.as_in(session, made, loaded, ctx))
    return evolve(parts, loaded=loaded, session=made, bundle=None, notes=notes)


def _check_equal(graphs: GraphSet, loaded: LoadedModel, device: str) -> None:
    from ..stages.capture.comparison import difference
    from ..stages.capture.dependence import training_matters
    from ..stages.capture.describe import describe

    why = "" if loaded.has_weights else "its parameters hold no data"
    if not why and describe(loaded).digest != graphs.model.digest:
        why = "its code, its attributes, or the shapes and types of its parameters are others"
    if not why:
        loaded.module.to(device)
        why = training_matters(loaded) or difference(graphs, loaded)
    if why:
        raise UsageError(f"{loaded.name} cannot run the programs that were compiled for {graphs.model.name}: {why}; compile it by itself")
