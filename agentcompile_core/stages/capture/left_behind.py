"""What a forward leaves in the attributes of modules: taken back after a trace, and a reason where one fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[list[str]]:
    """Give every module the attributes back that it had; the list names those that hold another tensor at the end.

    Parameters and buffers are not attributes of this kind. A trace would leave tensors without data behind.
    """
    before = {path: dict(vars(part)) for path, part in model.named_modules()}
    left: list[str] = []
    try:
        yield left
    finally:
        for path, part in model.named_modules():
            had: dict[str, Any] = before.get(path, {})
            for name in [n for n, value in vars(part).items() if isinstance(value, Tensor) and value is not had.get(n)]:
                left.append(f"{path}.{name}")
                if name in had:
                    vars(part)[name] = had[name]
                else:
                    del vars(part)[name]
