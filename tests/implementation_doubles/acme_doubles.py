"""A plugin for tests: implementations of ``linear`` with a residual; honest ones, and one per way to break the contract.

The file ``acme_settings`` beside it says what is installed: ``set`` (``honest``; ``outside``: honest and not capturable;
``broken``), ``version``, and ``fails`` (``accepts``, ``bind`` or ``run``), as another machine or an update would.
"""

import os
from pathlib import Path

import torch

from agentcompile_core.errors import Reject
from agentcompile_core.ir.plan import Origin, Parameter, Schedule, ScheduleSpace
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.plugin.interfaces import Implementation

# The folder stands for the package: both processes of a compilation read what is installed in it.
SETTINGS = dict(line.split("=") for line in (Path(__file__).parent / "acme_settings").read_text().split())


def setting(name: str, default: str) -> str:
    return SETTINGS.get(name, default)


class Residual(Implementation):
    """``out = weight @ x + aux0``, for the O and the down projection."""

    name = "residual"
    origin = Origin.HANDWRITTEN
    capturable = setting("set", "honest") != "outside"
    version = int(setting("version", "1"))

    def accepts(self, match, target):
        if setting("fails", "") == "accepts":
            return Reject("its library is too old here")
        if match.kind != "linear" or match.operand("aux0") is None or match.text("norm") != "none" or match.integer("pair") != 1:
            return Reject("serves a linear layer with a residual")
        return True

    def space(self, match, target):
        points = tuple(Schedule({"chunks": n}) for n in (1, 2))
        return ScheduleSpace(parameters=(Parameter(name="chunks", values=(1, 2)),), points=points)

    def bind(self, match, schedule, target):
        if setting("fails", "") == "bind":
            raise OSError("libacme.so was not found")
        chunks, outside = schedule.integer("chunks"), not self.capturable

        def run(x, weight, aux0, out):
            if setting("fails", "") == "run":
                raise RuntimeError("no kernel image for this device")
            if outside and out.is_cuda:
                assert not torch.cuda.is_current_stream_capturing(), "captured, though it says that it cannot be"
                torch.cuda.current_stream().synchronize()
            rows = out.numel() // chunks
            for i in range(chunks):
                part = slice(i * rows, (i + 1) * rows)
                torch.addmv(aux0.view(-1)[part], weight[part], x.view(-1), out=out.view(-1)[part])

        return run


class Broken(Residual):
    """Does what its name says, on the down projection only."""

    capturable = True

    def __init__(self, name):
        self.name = name

    def accepts(self, match, target):
        if self.name == "raises_in_accepts":
            raise ValueError("accepts is broken")
        if self.name == "answers_nothing":
            return None
        answer = super().accepts(match, target)
        return answer if answer is not True or match.integer("k") > match.integer("n") else Reject("the down projection only")

    def space(self, match, target):
        if self.name == "raises_in_space":
            raise ValueError("space is broken")
        return ScheduleSpace(parameters=(), points=(Schedule({}),))

    def bind(self, match, schedule, target):
        if self.name == "raises_in_bind":
            raise OSError("libacme.so was not found")
        return "a string" if self.name == "binds_nothing" else getattr(self, self.name)

    def raises_in_run(self, x, weight, aux0, out):
        raise ValueError("run is broken")

    def takes_other_operands(self, x, weight, bias, out):
        pass

    def is_wrong(self, x, weight, aux0, out):
        torch.addmv(aux0.view(-1), weight, x.view(-1) * 1.05, out=out.view(-1))

    def returns_a_new_tensor(self, x, weight, aux0, out):
        return torch.addmv(aux0.view(-1), weight, x.view(-1))

    def writes_half(self, x, weight, aux0, out):
        half = out.numel() // 2
        torch.addmv(aux0.view(-1)[:half], weight[:half], x.view(-1), out=out.view(-1)[:half])

    def writes_outside(self, x, weight, aux0, out):
        torch.addmv(aux0.view(-1), weight, x.view(-1), out=out.view(-1))
        out.as_strided((out.numel() + 8,), (1,))[-8:] = 1.0

    def changes_its_input(self, x, weight, aux0, out):
        torch.addmv(aux0.view(-1), weight, x.view(-1), out=out.view(-1))
        x.add_(1.0)

    def remembers_addresses(self, x, weight, aux0, out):
        self.first = getattr(self, "first", None) or (x, weight, aux0, out)
        x, weight, aux0, out = self.first
        torch.addmv(aux0.view(-1), weight, x.view(-1), out=out.view(-1))

    def aborts(self, x, weight, aux0, out):
        os.abort()


BROKEN = ("raises_in_accepts", "answers_nothing", "raises_in_space", "raises_in_bind", "binds_nothing", "raises_in_run",
          "takes_other_operands", "is_wrong", "returns_a_new_tensor", "writes_half", "writes_outside", "changes_its_input",
          "remembers_addresses", "aborts")


@hookimpl
def agentcompile_implementations():
    """What ``acme_settings`` asks for."""
    return tuple(Broken(name) for name in BROKEN) if setting("set", "honest") == "broken" else (Residual(),)
