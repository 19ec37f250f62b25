"""What transformers holds as ``past_key_values`` of rows whose keys and values lie in a session's cache, or parked beside it."""

from typing import TYPE_CHECKING

from .sequences import Row, Sequences

if TYPE_CHECKING:
    import torch


class StepCache:
    """One row per sequence of a request. It answers what transformers' loops ask of a Cache; only ``StepModel.forward`` fills it."""

    is_compileable = False
    is_linear = (False,)  # by layer: positions are counted, whatever a model keeps

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self.rows: list[Row] = []
        self._seen = 0

    @property
    def is_croppable(self) -> bool:
        """Whether tokens may be taken back."""
        return self.sequences.rewinds

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read so far, padding among them, as transformers counts."""
        return self._seen

    def read(self, ids: "torch.Tensor", shown: "torch.Tensor", keep: int) -> "torch.Tensor":
        """Read ids [rows, n] where ``shown`` [rows, n] is 1; logits [rows, keep, vocabulary] behind the last ``keep`` columns."""
        import torch

        if not self.rows:
            self.rows = [Row() for _ in range(ids.shape[0])]
        found = []
        for row, tokens, real in zip(self.rows, ids.tolist(), shown.tolist(), strict=True):
            read = [token for token, is_real in zip(tokens, real, strict=True) if is_real]
            one = self.sequences.logits(row, read, min(keep, len(read)))
            # Behind padding there are no logits: transformers computes some there, and nobody reads them.
            found.append(torch.cat([one.new_zeros(keep - len(one), one.shape[1]), one]))
        self._seen += ids.shape[1]
        return torch.stack(found)

    def reorder_cache(self, beam_idx: "torch.Tensor") -> None:
        """Row i becomes what row ``beam_idx[i]`` is."""
        used: set[int] = set()
        rows = []
        for index in beam_idx.tolist():
            rows.append(self.sequences.copy(self.rows[index]) if index in used else self.rows[index])
            used.add(index)
        self.rows = rows

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times."""
        self.rows = [self.sequences.copy(row) if i else row for row in self.rows for i in range(repeats)]

    def batch_select_indices(self, indices: "torch.Tensor") -> None:
        """Only the rows of ``indices``."""
        self.rows = [self.rows[index] for index in indices.tolist()]

    def activate_past_recording(self) -> None:
        """Nothing to do: what is behind a position is written again."""

    def crop(self, tokens_to_remove: int) -> None:
        """Take ``-tokens_to_remove`` tokens of every row back; a positive number is the length to keep, as older callers mean it."""
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self._seen - tokens_to_remove)
        for row in self.rows:
            row.cut(count)
        self._seen -= count
