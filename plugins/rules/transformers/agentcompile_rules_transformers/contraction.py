"""Two operands with named axes as one batched product: which axes are rows, columns, terms and batch, and how far they step."""

from collections.abc import Hashable, Mapping, Sequence

from attrs import frozen

MOST_BATCH_AXES = 2


@frozen(kw_only=True)
class Labelled:
    """An operand: a label per axis, extents, and strides in elements. An axis of one element meets one of any extent."""

    labels: Sequence[Hashable]
    shape: Sequence[int]
    strides: Sequence[int]


@frozen
class Axis:
    """An axis of the product and how far one step moves in the first and in the second operand (0: not at all)."""

    extent: int = 1
    a: int = 0
    b: int = 0

    def joined(self, inner: "Axis") -> "Axis | None":
        """This axis and the next one inside it as one, where both operands step evenly over both."""
        even = self.a == inner.a * inner.extent and self.b == inner.b * inner.extent
        return Axis(self.extent * inner.extent, inner.a, inner.b) if even else None

    @property
    def turned(self) -> "Axis":
        """The operands the other way round."""
        return Axis(self.extent, self.b, self.a)


@frozen(kw_only=True)
class Layout:
    """out[outer, inner, rows, columns] = sum over terms of a b, ``out`` in one piece; ``swapped``: a is the second operand given."""

    outer: Axis
    inner: Axis
    rows: Axis
    columns: Axis
    terms: Axis
    swapped: bool


def contraction(a: Labelled, b: Labelled, out: Sequence[Hashable]) -> Layout | None:
    """The product of ``a`` and ``b`` whose result has the axes ``out``; None where it is none with at most two batch axes.

    Columns are the last axes that one operand alone has, rows those before them that the other alone has.
    """
    axes = _axes(a, b)
    if axes is None or not set(out) <= set(axes):
        return None
    summed = [axis for label, axis in axes.items() if label not in out and axis.extent != 1]
    terms = _merged(summed)
    left = [axes[label] for label in out if axes[label].extent != 1]
    if len(terms) > 1 or any(not (axis.a and axis.b) for axis in summed):
        return None
    swapped = bool(left) and left[-1].b == 0
    if swapped:
        left, terms = [axis.turned for axis in left], [axis.turned for axis in terms]
    columns = _last(left, of_a=False)
    rows = _last(left, of_a=True)
    batch = _merged(left)
    if len(batch) > MOST_BATCH_AXES:
        return None
    outer, inner = [Axis()] * (MOST_BATCH_AXES - len(batch)) + batch
    return Layout(outer=outer, inner=inner, rows=rows, columns=columns, terms=terms[0] if terms else Axis(), swapped=swapped)


def _axes(a: Labelled, b: Labelled) -> Mapping[Hashable, Axis] | None:
    """The axes by label, those of ``a`` first; None where an operand has a label twice or extents differ."""
    found: dict[Hashable, Axis] = {}
    for operand, first in ((a, True), (b, False)):
        if len(set(operand.labels)) != len(operand.labels):
            return None
        for label, extent, stride in zip(operand.labels, operand.shape, operand.strides, strict=True):
            known, step = found.get(label, Axis()), stride if extent != 1 else 0
            if 1 not in (extent, known.extent) and extent != known.extent:
                return None
            whole = max(extent, known.extent)
            found[label] = Axis(whole, step, 0) if first else Axis(whole, known.a, step)
    return found


def _merged(axes: Sequence[Axis]) -> list[Axis]:
    """Neighbouring axes joined where that is possible."""
    done: list[Axis] = []
    for axis in axes:
        joined = done[-1].joined(axis) if done else None
        done[-1:] = [joined] if joined is not None else [*done[-1:], axis]
    return done


def _last(axes: list[Axis], *, of_a: bool) -> Axis:
    """Take the last axes that one operand alone has, as one axis; one element where there is none."""
    taken = Axis()
    while axes and bool(axes[-1].a) == of_a and bool(axes[-1].b) != of_a:
        joined = axes[-1].joined(taken) if taken.extent != 1 else axes[-1]
        if joined is None:
            break
        taken = joined
        axes.pop()
    return taken
