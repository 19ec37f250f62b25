"""What changed about a module after its programs were bound to its parameters, so that they compute what it was and not what it is."""

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import evolve

from .as_captured import as_captured
from .device import at_any_length
from .held import HOLDS, Held, held_by, keeps
from .unregistered import reading
from .watched import EXCHANGEABLE, PATCHED, REPLACED, SET, class_values_of, functions_of, slots_of

if TYPE_CHECKING:
    import torch

    from ..plugin.interfaces import Backend

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ALL = "every module of torch"
_EVERYWHERE = ("_global_forward_pre_hooks", "_global_forward_hooks")


@cache
def _placed() -> Any:
    """Parameters that weight stores moved: where to at last, their version then, and where they had the same values before."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def place(parameter: "torch.Tensor", data: "torch.Tensor") -> None:
    """Let ``parameter`` be the same values at another place, ``data``."""
    then, known = parameter.data_ptr(), _placed().get(parameter)
    before = known[2] if known is not None and known[:2] == (then, version_of(parameter)) else ()
    parameter.data = data
    _placed()[parameter] = data.data_ptr(), version_of(parameter), (*before, then)


class AsBound:
    """A module's parameters, buffers, parts, methods, hooks and plain attributes as they are now. Values written in place are no change.

    Every request asks, so an unchanged module is seen in a few passes over all of it that Python does not interpret item by item.

    Args:
        module: whose programs were bound.
        with_mode: its training mode has a say; a language model's has none, and its configuration is looked at.
        forward: runs the module once on as little as possible. Some forwards exchange buffers and attributes themselves, as those
            of frequencies that follow the length: what one puts back, or writes whatever it was, is no change. None: nothing does.
    """

    def __init__(self, module: "torch.nn.Module", with_mode: bool, forward: "Callable[[torch.nn.Module], object] | None" = None) -> None:
        import torch

        self._slots, self._forward = slots_of(module, with_mode), forward
        self._values = [owner.get(name) for owner, name, _, _ in self._slots]
        self._stand_ins: dict[int, tuple[torch.Tensor, int]] = {}  # by slot: equal buffers in the place of those that are read
        self._parameters = [one for one, (*_, words) in zip(self._values, self._slots, strict=True)
                            if words is REPLACED and one is not None and one.layout is torch.strided]  # others lie in several places
        self._lie = [(p.data_ptr(), p.shape, p.stride(), p.dtype) for p in self._parameters]
        hooks = [(getattr(part, table), path or type(part).__name__) for path, part in module.named_modules() for table in _HOOKS]
        hooks += [(getattr(torch.nn.modules.module, table), _ALL) for table in _EVERYWHERE]
        self._hooks, self._hooked = map(list, zip(*hooks, strict=True))
        self._counts = list(map(_count, self._hooks, self._hooked))
        self._parts = [(path or type(part).__name__, part, type(part)) for path, part in module.named_modules()]
        self._methods = [(kind, name, getattr(kind, name)) for kind, name in (*functions_of(module), *class_values_of(module))]
        self._held = list(held_by(module))
        self._is_same = self._same()

    def change(self) -> str:
        """One clause on the first change; empty: there is none."""
        if self._is_same():
            return ""
        found = self._first()
        if not found:  # what stands in another's place, and hooks of transformers' own, are what is seen from now on
            self._is_same = self._same()
        return found

    def note_reads(self, call: "Callable[[AbstractContextManager[None]], object]", all_of_it: bool) -> None:
        """Of tensors that lie in lists, mappings and objects, those have to stay there that ``call``, a call of the module, reads and
        leaves there. Others a forward keeps for somebody else, and exchanges, or writes to, as to those of modules. Where it raises, all
        have to.

        ``call`` is given the context that the module runs in, before what that leaves behind is taken back. ``all_of_it``: what is not
        read then never is.
        """
        if not any(one.tensors or one.within for one in self._held):
            return
        every = frozenset(id(tensor) for one in self._held for tensor in (*one.tensors, *one.within))
        read, there = every, [every] * len(self._held)

        @contextmanager
        def watched() -> Iterator[None]:
            nonlocal read, there
            with reading() as seen:
                yield
            read, there = frozenset(seen) if all_of_it else every, [one.there() for one in self._held]

        with suppress(Exception):  # whatever it raises
            call(watched())
        self._held = [one.known_to_read(read, stay, every - read) for one, stay in zip(self._held, there, strict=True)]
        self._is_same = self._same()

    def adopt(self) -> None:
        """What differs now among what a forward may exchange is what was bound: the module itself ran since ``change`` found nothing."""
        if self._forward is not None and not self._is_same():
            for at in filter(self._is_exchangeable, self._different()):
                self._values[at] = self._now(at)
                self._stand_ins.pop(at, None)
            self._held = [evolve(one, form=one.now()) for one in self._held]
            self._is_same = self._same()

    def _same(self) -> Callable[[], bool]:
        """Whether nothing at all is another thing than it was, in a function over local values: small modules ask at every call."""
        owners, names, values = [one[0] for one in self._slots], [one[1] for one in self._slots], self._values
        parts, kinds = [one[1] for one in self._parts], [one[2] for one in self._parts]
        classes, methods, functions = (list(map(operator.itemgetter(at), self._methods)) for at in range(3))
        parameters, lie, hooks, stand_ins = self._parameters, self._lie, self._hooks, tuple(self._stand_ins.values())
        held = self._held
        count, get, is_same = sum(map(len, hooks)), dict.get, operator.is_

        def same() -> bool:
            return (all(map(is_same, map(get, owners, names), values))
                    and [(p.data_ptr(), p.shape, p.stride(), p.dtype) for p in parameters] == lie
                    and all(map(is_same, map(getattr, classes, methods), functions)) and all(map(is_same, map(type, parts), kinds))
                    and (sum(map(len, hooks)) == count if count else not any(hooks))
                    and not (stand_ins and any(version_of(one) != then for one, then in stand_ins))
                    and not (held and any(map(Held.changed, held))))

        return same

    def _first(self) -> str:
        changed = [at for at, ((owner, name, _, _), then) in enumerate(zip(self._slots, self._values, strict=True))
                   if owner.get(name) is not then]
        lasting = changed if self._forward is None else [at for at in changed if not self._is_exchangeable(at)]
        return (self._named(self._others(lasting)) or self._of_others() or self._named(self._not_put_back(changed)) or self._written()
                or self._in_held())

    def _named(self, changed: list[int]) -> str:
        return f"{self._slots[changed[0]][2]} {self._slots[changed[0]][3]}" if changed else ""

    def _of_others(self) -> str:
        """What no name is looked up for: where parameters lie, classes and their methods, hooks."""
        for parameter, then in zip(self._parameters, self._lie, strict=True):
            now = parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype
            if now != then and (now[0] == then[0] or not _moved_by_a_store(parameter, then[0])):  # a store lays out anew what it moves
                return f"{next(one[2] for one, v in zip(self._slots, self._values, strict=True) if v is parameter)} {REPLACED}"
        for path, part, kind in self._parts:
            if type(part) is not kind:
                return f"{path} became a {type(part).__name__}"
        for kind, name, function in self._methods:
            if getattr(kind, name, None) is not function:
                words = "got another forward" if name == "forward" else PATCHED if callable(function) else SET
                return f"{kind.__name__}.{name} {words}"
        for hooks, count, path in zip(self._hooks, self._counts, self._hooked, strict=True):
            if _count(hooks, path) != count:
                return f"{path} got a hook or lost one"
        return ""

    def _not_put_back(self, changed: list[int]) -> list[int]:
        """Those of ``changed`` that are other values, and that the forward of the module itself leaves so."""
        others = self._others(changed)
        if not others:
            return others
        before = [self._now(at) for at in range(len(self._slots))]
        if not self._ran():
            return others
        written = {at for at, then in enumerate(before) if self._now(at) is not then}
        left = self._others(self._different())
        if lasting := [at for at in left if at not in written]:
            return lasting
        for at in reversed(left):  # its forward writes it whatever it is: nobody asks for it again
            del self._slots[at], self._values[at]
            self._stand_ins = {place - (place > at): one for place, one in self._stand_ins.items() if place != at}
        return []

    def _ran(self) -> bool:
        """Run the forward of the module itself; False: it cannot be, so that it puts nothing back, and a change is refused."""
        import torch

        try:
            if self._forward is not None:
                self._forward(self._parts[0][1])
        except torch.OutOfMemoryError:
            raise  # that there is no memory for it says nothing of the module
        except Exception:  # whatever it is
            return False
        return self._forward is not None

    def _in_held(self) -> str:
        """What changed within what parts hold. What the forward of the module itself writes there is not asked for again."""
        now = [(one, one.now()) for one in self._held]
        changed = [one for one, form in now if not keeps(form, one.form)]
        if changed and self._ran():
            after = [(one, form) for one, before in now if keeps(form := one.now(), before)]
            self._held = [one for one, _ in after]
            changed = [one for one, form in after if not keeps(form, one.form)]
        return f"{changed[0].path} {HOLDS}" if changed else ""

    def _different(self) -> list[int]:
        return [at for at in range(len(self._slots)) if self._now(at) is not self._values[at]]

    def _others(self, changed: list[int]) -> list[int]:
        """Those of ``changed`` that are other values now; what is equal stands for what was bound from now on."""
        found = []
        for at in changed:
            now, then = self._now(at), self._values[at]
            if self._is_exchangeable(at) and _equal(now, then):
                if self._slots[at][3] is EXCHANGEABLE:  # programs read the one that was bound, where nobody writes any more
                    self._stand_ins[at] = now, version_of(now)
                self._values[at] = now
            else:
                found.append(at)
        return found

    def _is_exchangeable(self, at: int) -> bool:
        words = self._slots[at][3]
        return words is SET or (words is EXCHANGEABLE and self._forward is not None)

    def _now(self, at: int) -> Any:
        owner, name, _, _ = self._slots[at]
        return owner.get(name)

    def _written(self) -> str:
        """What was written to a buffer that stands in the place of the one that is read."""
        found = next((at for at, (one, then) in self._stand_ins.items() if version_of(one) != then), None)
        return "" if found is None else f"{self._slots[found][2]} {EXCHANGEABLE}"


def read_token(module: "torch.nn.Module", device: str, backend: "Backend | None") -> None:
    """Let a language model itself read one token, in transformers' own loop: what prepares its forward exchanges something, too."""
    import torch

    model: Any = module
    ids = torch.zeros((1, 1), dtype=torch.int64, device=device)
    greedy = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "num_return_sequences": 1, "pad_token_id": 0,
              "cache_implementation": None, "disable_compile": True}
    with as_captured(), at_any_length(backend), torch.inference_mode(False), torch.no_grad():  # what it exchanges may be written to later
        try:
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **greedy)
        except Exception:  # it has none, or one of its own
            model(input_ids=ids)


def _equal(now: Any, then: Any) -> bool:
    import torch

    if isinstance(now, torch.Tensor) and isinstance(then, torch.Tensor):
        return now.shape == then.shape and now.dtype == then.dtype and torch.equal(now.to(then.device), then)
    if isinstance(now, tuple) and isinstance(then, tuple):  # the text of a large tensor in it leaves out its middle
        return type(now) is type(then) and len(now) == len(then) and all(map(_equal, now, then))
    return type(now) is type(then) and repr(now) == repr(then)


def _moved_by_a_store(parameter: "torch.Tensor", then: int) -> bool:
    """Whether it lies elsewhere than at ``then`` only because it was compiled once more, with the same values since."""
    known = _placed().get(parameter)
    return known is not None and known[:2] == (parameter.data_ptr(), version_of(parameter)) and then in known[2]


def version_of(tensor: "torch.Tensor") -> int:
    return -1 if tensor.is_inference() else int(tensor._version)


def _count(hooks: dict[int, Any], of: str) -> int:
    """Hooks, less those by which transformers looks at what its models compute, and torch at what all modules do."""
    watching = ("transformers.", "torch.") if of == _ALL else ("transformers.",)
    return sum(not str(getattr(hook, "__module__", "")).startswith(watching) for hook in hooks.values())
