"""An installed program against the framework's program of the same graph: the last look before it serves."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..plugin.interfaces import LoadedModel
from ..runtime.binder import bind
from ..runtime.executables import Executables
from ..runtime.module_session import ModuleSession
from ..runtime.program import Program, framework_program
from ..runtime.session import Session

if TYPE_CHECKING:
    import torch

    from ..runtime.weights import WeightStore

FLOAT32_BOUND = 1e-3  # relative rms error of a step in float32


def difference(session: "Session | ModuleSession", programs: Mapping[str, Program], weights: "WeightStore", loaded: LoadedModel) -> str:
    """One clause on how far the installed programs are from the framework's; empty where they agree.

    A language model runs one prompt token and one decode step, a module its example inputs. The relative rms error may be
    1e-3 in float32 and 24 epsilon in narrower types.
    """
    pairs = _steps(session, programs, weights) if isinstance(session, Session) else _calls(session, programs, weights, loaded)
    return next((why for found, wanted in pairs if (why := _beyond(found, wanted))), "")


def _steps(session: Session, programs: Mapping[str, Program], weights: "WeightStore") -> "list[tuple[torch.Tensor, torch.Tensor]]":
    import torch

    if session.max_context < 3:
        return []
    highest = max(1, (session.graphs.model.vocab_size or 2) - 1)
    tokens = torch.tensor([[1 + highest // 3, highest // 2]]).clamp(max=highest)
    found = session.teacher_forced(tokens)[-1]
    bound = bind(framework_program(programs["decode"].graph), weights, session.states, {}, Executables(device=session.device))
    with torch.inference_mode():
        session.prefill(tokens[:, :1])
        session.ids.copy_(tokens[:, 1:])
        bound.run()
        return [(found, bound.output(0)[0, -1].clone())]


def _calls(session: ModuleSession, programs: Mapping[str, Program], weights: "WeightStore",
           loaded: Any) -> "list[tuple[torch.Tensor, torch.Tensor]]":
    import torch

    graph = programs["forward"].graph
    if not hasattr(loaded, "example_inputs"):
        return []
    inputs = session.flat(loaded.example_inputs, loaded.example_keywords)
    found = session.run(inputs)
    copies = {name: tensor.to(session.device, copy=True) for name, tensor in zip(graph.inputs, inputs, strict=True)}
    bound = bind(framework_program(graph), weights, {}, copies, Executables(device=session.device))
    with torch.inference_mode():
        bound.run()
        return [(one, bound.output(i).clone()) for i, one in enumerate(found)]


def _beyond(found: Any, wanted: Any) -> str:
    import torch

    from ..ops.agreement import half_bound

    if not wanted.is_floating_point():
        return ""  # the kernels' validation compares integers, of which ties may fall either way
    finite = torch.isfinite(wanted)
    if not torch.equal(finite, torch.isfinite(found)):
        count = int((finite != torch.isfinite(found)).sum())
        return f"{count} of its {wanted.numel()} results are NaN or infinite where the framework's are not, or the other way round"
    wide = torch.finfo(wanted.dtype).eps <= torch.finfo(torch.float32).eps
    bound = FLOAT32_BOUND if wide else half_bound(wanted.dtype)
    one, other = found[finite].double(), wanted[finite].double()
    if not other.numel():
        return ""
    error, rms = float((one - other).square().mean().sqrt()), float(other.square().mean().sqrt())
    return "" if error <= bound * rms or error == 0.0 else f"its rms error is {error:.3g} where the framework's rms is {rms:.3g}"
