"""What torch.export makes that nobody here reads, left out: stacks of operators, code of graphs, its log, garbage found early."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.fx
import torch.fx.proxy
from torch._logging import _internal as logs
from torch.export import _trace, exported_program
from torch.fx import _lazy_graph_module as lazy
from torch.fx.experimental import proxy_tensor

from ...garbage import uncollected

SETTING = "do_not_emit_stack_traces"  # of torch.fx.config, from torch 2.13 on


@contextmanager
def without_what_nobody_reads() -> Iterator[None]:
    """Within it a torch.export takes two thirds of its time; what it returns says the same of every operator."""
    with _without_stacks(), _without_layouts(), _without_code(), _without_log(), _without_bindings(), uncollected():
        yield


@contextmanager
def _without_stacks() -> Iterator[None]:
    """No Python stack of every operator: a seventh of the time, a fifth where torch 2.11 keeps whole stacks."""
    config: Any = torch.fx.config
    owner, name, value = (config, SETTING, True) if hasattr(config, SETTING) else (torch.fx.proxy, "CapturedTraceback", _NoStack)
    with _exchanged(owner, name, value):
        yield


class _NoStack:
    """In the place of the class by which torch 2.11 looks at the stack, always: an empty one is what it knows as none."""

    @classmethod
    def extract(cls, *_: Any, **__: Any) -> "_NoStack":
        return cls()

    def summary(self) -> list[Any]:
        return []


@contextmanager
def _without_layouts() -> Iterator[None]:
    """No second note of every tensor's layout beside the tensor itself (``tensor_meta`` beside ``val``): a twentieth of the time."""
    with _exchanged(proxy_tensor, "_extract_tensor_metadata", lambda *_, **__: None):
        yield


@contextmanager
def _without_code() -> Iterator[None]:
    """Graphs write their Python code when it is asked for, as they do within torch.compile: a sixth of the time."""
    switch = getattr(lazy, "_use_lazy_graph_module", None)
    if switch is None:
        yield
        return
    with switch(True), _exchanged(exported_program, "_create_graph_module_for_export", lazy._make_graph_module):
        yield


@contextmanager
def _without_log() -> Iterator[None]:
    """No record of every tensor for ``TORCH_TRACE``, a thirtieth of the time: an export is quiet, so none of them would be written."""
    with _exchanged(getattr(logs, "trace_log", None), "handlers", []):
        yield


@contextmanager
def _without_bindings() -> Iterator[None]:
    """Graphs that hold no symbols of data are not searched for what binds these: a fortieth of the time."""
    before = getattr(_trace, "_replace_unbacked_bindings", None)

    def replace(gm: torch.fx.GraphModule) -> Any:
        return before(gm) if before and any("unbacked_bindings" in node.meta for node in gm.graph.nodes) else None

    with _exchanged(_trace, "_replace_unbacked_bindings", replace):
        yield


@contextmanager
def _exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``value`` in the place of ``owner``'s ``name``, where this torch has one."""
    before = getattr(owner, name, None)
    if before is None:
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
