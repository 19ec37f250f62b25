"""Printing of expressions in any dialect, names with digests, and what a source may include."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.codegen.naming import rename, source_digest
from agentcompile_core.codegen.printing import Dialect, print_expression
from agentcompile_core.errors import ContractError
from agentcompile_core.ir.expression import Expression, Operation, PointwiseKind

K = PointwiseKind
MEANING = {
    K.ADD: lambda a, b: a + b,
    K.SUB: lambda a, b: a - b,
    K.MUL: lambda a, b: a * b,
    K.DIV: lambda a, b: a / b if b else math.inf,
    K.NEG: lambda a: -a,
    K.RELU: lambda a: max(a, 0.0),
    K.TANH: math.tanh,
    K.SIGMOID: lambda a: 0.5 * (1 + math.tanh(a / 2)),
    K.SILU: lambda a: a * 0.5 * (1 + math.tanh(a / 2)),
    K.EXP: lambda a: math.exp(min(a, 80.0)),
    K.RSQRT: lambda a: 1 / math.sqrt(abs(a) + 1e-3),
    K.GELU: lambda a: 0.5 * a * (1 + math.erf(a / math.sqrt(2))),
    K.GELU_TANH: lambda a: 0.5 * a * (1 + math.tanh(0.8 * (a + 0.04 * a * a * a))),
    K.ROUND: lambda a: float(round(a)) if math.isfinite(a) else a,
    K.ABS: abs,
    K.SQRT: lambda a: math.sqrt(abs(a)),
    K.LOG: lambda a: math.log(abs(a) + 1e-3),
    K.LOG1P: lambda a: math.log1p(abs(a)),
    K.EXPM1: lambda a: math.expm1(min(a, 80.0)),
    K.ERF: math.erf,
    K.SIN: lambda a: math.sin(a) if math.isfinite(a) else a,
    K.COS: lambda a: math.cos(a) if math.isfinite(a) else a,
    K.FLOOR: lambda a: float(math.floor(a)) if math.isfinite(a) else a,
    K.MIN: min,
    K.MAX: max,
    K.GREATER: lambda a, b: float(a > b),
    K.AT_LEAST: lambda a, b: float(a >= b),
    K.EQUAL: lambda a, b: float(a == b),
    K.WHERE: lambda a, b, c: b if a else c,
}
OPERATORS = {K.ADD: "{0} + {1}", K.SUB: "{0} - {1}", K.MUL: "{0} * {1}", K.NEG: "-({0})"}
PYTHON = Dialect(name="python", operations={k: OPERATORS.get(k, f"{k.value}({', '.join(['{0}', '{1}', '{2}'][:k.arity])})") for k in K},
                 literal=lambda x: f"float('{x!r}')", local="{name} = {value}")
ARGUMENTS = ("acc0", "acc1", "aux0")
NAMES = {"acc0": "acc[0]", "acc1": "acc[1]", "aux0": "aux[0]"}


def evaluate(expression: Expression, values: dict[str, float]) -> float:
    """What an expression means, without any text."""
    results: list[float] = []
    for op in expression.operations:
        read = [values[o] if isinstance(o, str) else results[o] if type(o) is int else o for o in op.operands]
        results.append(MEANING[op.kind](*read))
    return results[-1] if results else values[expression.arguments[0]]


@st.composite
def expressions(draw: st.DrawFn) -> Expression:
    operations: list[Operation] = []
    for index in range(draw(st.integers(0, 8))):
        operand = st.sampled_from(ARGUMENTS) | st.floats(-4, 4, width=32) | (st.integers(0, index - 1) if index else st.nothing())
        kind = draw(st.sampled_from(list(K)))
        operations.append(Operation(kind, tuple(draw(operand) for _ in range(kind.arity))))
    return Expression(arguments=ARGUMENTS, operations=tuple(operations))


@given(expressions(), st.tuples(*[st.floats(-3, 3, width=32)] * 3))
def test_printed_text_means_what_the_expression_means(expression: Expression, given_values: tuple[float, ...]) -> None:
    values = dict(zip(ARGUMENTS, given_values))
    room = {kind.value: call for kind, call in MEANING.items()} | {"acc": given_values[:2], "aux": given_values[2:]}
    printed = print_expression(expression, PYTHON, NAMES)
    exec("\n".join(printed.lines), room)  # text that this test printed
    found, expected = eval(printed.result, room), evaluate(expression, values)
    assert found == expected or (math.isnan(found) and math.isnan(expected))
    own = print_expression(expression, PYTHON)  # arguments under their own names
    exec("\n".join(own.lines), room | values)
    assert [line.replace("acc0", "acc[0]").replace("acc1", "acc[1]").replace("aux0", "aux[0]") for line in own.lines] == list(printed.lines)


@pytest.mark.parametrize(("expression", "message"), [
    (Expression(arguments=()), "has no result"),
    (Expression(arguments=("in0",)), "reads 'in0', which the template does not give; it gives acc0, acc1, aux0"),
    (Expression(arguments=("acc0",), operations=(Operation(K.ADD, ("acc0",)),)), "add takes 2 operands, got 1"),
    (Expression(arguments=("acc0",), operations=(Operation(K.NEG, (0,)),)), "reads operation 0, which is not before it"),
    (Expression(arguments=("acc0",), operations=(Operation(K.NEG, (-1,)),)), "reads operation -1, which is not before it"),
    (Expression(arguments=("acc0",), operations=(Operation(K.NEG, ("aux0",)),)), "reads 'aux0', which is not an argument"),
])
def test_malformed_expressions_are_refused(expression: Expression, message: str) -> None:
    with pytest.raises(ContractError, match=re.escape(message)):
        print_expression(expression, PYTHON, NAMES)


def test_a_dialect_may_lack_a_kind_and_says_so() -> None:
    small = Dialect(name="small", operations={K.ADD: "{0} + {1}"}, literal=repr, local="{name} = {value}")
    with pytest.raises(ContractError, match="the dialect 'small' cannot say silu; it says add"):
        print_expression(Expression(arguments=("a",), operations=(Operation(K.SILU, ("a",)),)), small)


IDENTIFIERS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)


@given(st.lists(IDENTIFIERS, min_size=1, max_size=8), st.sets(IDENTIFIERS, max_size=3))
def test_only_whole_identifiers_are_renamed(words: list[str], renamed: set[str]) -> None:
    text = " + ".join(words)
    assert rename(text, renamed, "d1") == " + ".join(f"{word}_d1" if word in renamed else word for word in words)


def test_digests_tell_languages_and_texts_apart() -> None:
    found = {source_digest(*texts, language=language) for language in ("a", "b") for texts in (("x",), ("x", "y"), ("xy",))}
    assert len(found) == 6
