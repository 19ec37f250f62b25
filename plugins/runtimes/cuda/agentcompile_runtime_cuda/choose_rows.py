"""The largest elements of rows of a few hundred, ``aten.topk``, by the kernel of ``choose_rows.cu``: the experts of a prompt's tokens."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentcompile_cuda_kit import c_type, make_source

from agentcompile_core.plugin_api import Access, Backend, DType, Launch, Role, StepSource, Target, i32, pointer

from .compared import Compared
from .own_kernels import OwnKernels

if TYPE_CHECKING:
    import torch

TEMPLATE = Path(__file__).with_name("choose_rows.cu")
TOPK = "aten.topk.default"
THREADS, WARP = 128, 32
HELD = (2, 4, 8, 16)  # elements of a lane: of rows of up to 64, 128, 256 and 512
MOST_CHOSEN = 64  # a choice is a turn of the whole warp


def source(dtype: DType, held: int) -> StepSource:
    """The kernel of one element type and width; grid and scalars are those of a call."""
    made = (pointer("values", Role.OUTPUT, dtype, Access.WRITE), pointer("places", Role.OUTPUT, DType.I64, Access.WRITE))
    launch = Launch(entry="choose_rows", grid=(1, 1, 1), block=(THREADS, 1, 1), pdl=True,
                    arguments=(pointer("x", Role.INPUT, dtype), *made, *(i32(name, 0) for name in ("rows", "columns", "chosen"))))
    return make_source(TEMPLATE, plan={"T": c_type(dtype), "threads": THREADS, "held": held}, launches=(launch,))


class ChooseRows:
    """The kernels by width, which ``backend`` builds for the target that is live on first use, and the body of ``aten.topk``."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None], compared: Compared) -> None:
        self._kernels = {held: OwnKernels(backend, target, partial(source, held=held)) for held in HELD}
        self._compared = compared
        self.bodies = {(TOPK,): self.topk}

    def topk(self, self_: "torch.Tensor", k: int, dim: int = -1, largest: bool = True,
             sorted: bool = True) -> "tuple[torch.Tensor, torch.Tensor] | None":
        """``aten.topk`` over the last axis; None where the kernel does not serve it."""
        import torch

        x, columns = self_, self_.shape[-1] if self_.dim() else 0
        held = next((one for one in HELD if columns <= one * WARP), 0)
        whole = held and largest and dim in (-1, x.dim() - 1) and 1 <= k <= min(columns, MOST_CHOSEN)
        if not whole or not x.numel() or not x.is_contiguous() or not x.is_floating_point() or x.element_size() > 4:
            return None
        values = torch.empty((*x.shape[:-1], k), dtype=x.dtype, device=x.device)
        places = torch.empty(values.shape, dtype=torch.int64, device=x.device)
        kernels, rows = self._kernels[held], x.numel() // columns

        def launch() -> None:
            kernels.run(x, kernels.launches(x)[0], -(-rows // (THREADS // WARP)), (x, values, places), (rows, columns, k))

        def found() -> "tuple[torch.Tensor, ...]":  # which of equal ones is chosen is nobody's business
            return values, x.gather(-1, places.clamp(0, columns - 1))

        def framework() -> "tuple[torch.Tensor, ...]":
            wanted = torch.topk(x, k, -1).values
            return wanted, wanted

        return (values, places) if self._compared.agreed(("choose_rows", x.dtype, held), launch, found, framework) else None
