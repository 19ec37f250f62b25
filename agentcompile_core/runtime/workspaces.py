"""Scratch memory of steps: one piece for each workspace of a source, which its steps share as they run one after the other."""

from typing import TYPE_CHECKING

from ..ir.candidate import StepSource

if TYPE_CHECKING:
    import torch


class Workspaces:
    """Those of one program on ``device``; they live as long as this does."""

    def __init__(self, device: "torch.device | str") -> None:
        self._device = device
        self._made: dict[tuple[str, str, int], torch.Tensor] = {}

    def addresses(self, source: StepSource, run: int = 0) -> dict[str, int]:
        """By name, zeroed when they are first asked for; runs beside each other have their own."""
        import torch

        found = {}
        for workspace in source.workspaces:
            key = (source.key, workspace.name, run)
            if key not in self._made:
                self._made[key] = torch.zeros(workspace.nbytes, dtype=torch.uint8, device=self._device)
            found[workspace.name] = self._made[key].data_ptr()
        return found
