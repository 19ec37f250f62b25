"""The CUDA text that is written around templates: functors compute what their expression says, plans hold what they are given."""

import math
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from agentcompile_cuda_kit import c_type, elementwise_struct, epilogue_struct, known_length, make_source, plan_struct
from agentcompile_cuda_kit.functors import ORDERING, literal
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.plugin_api import ContractError, DType, Expression, Feature, Launch, Operation, PointwiseKind

GOLDEN = Path(__file__).parent / "golden"
K = PointwiseKind
GATE = Expression(arguments=("acc0", "acc1"), operations=(Operation(K.SILU, ("acc0",)), Operation(K.MUL, (0, "acc1"))))
BIAS_RESIDUAL = Expression(
    arguments=("acc0", "aux0", "aux1"),
    operations=(Operation(K.ADD, ("acc0", "aux0")), Operation(K.ROUND, (0,)), Operation(K.ADD, (1, "aux1"))),
)
SCALED = Expression(arguments=("in0",), operations=(Operation(K.TANH, ("in0",)), Operation(K.MUL, (0, 30.0))))

TEMPLATE = """// Plan is what the schedule chose; Planner is not renamed.
#include "plan.cuh"
static constexpr int replan = Plan::threads;
extern "C" __global__ void __launch_bounds__(Plan::threads) first_kernel(const Plan::T* x, float* out) {
  out[0] = Epilogue::apply(nullptr, nullptr);
}
extern "C" __global__ void first_kernel_tail(float* out) { out[0] = 0.0f; }
"""


@pytest.fixture
def golden(request):
    """``golden(name, text)``: compare with the file in ``golden``, or write it under ``--update-golden``."""

    def check(name, text):
        if request.config.getoption("--update-golden", default=False):
            (GOLDEN / name).write_text(text, encoding="utf-8")
        assert text == (GOLDEN / name).read_text(encoding="utf-8"), f"golden file {name} differs; if it should, use --update-golden"

    return check


def launch(entry="first_kernel"):
    return Launch(entry=entry, grid=(1, 1, 1), block=(32, 1, 1), arguments=())


def source(**changes):
    arguments = {
        "plan": {"T": c_type(DType.BF16), "threads": 32, "pdl": True, "eps": 1e-6, "huge": 1 << 40},
        "launches": [launch()],
        "epilogue": epilogue_struct(BIAS_RESIDUAL, 1, 2),
    }
    return make_source(TEMPLATE, **{**arguments, **changes})


def test_functors_are_the_golden_text(golden):
    golden("epilogue_identity.txt", epilogue_struct(None, 1, 0))
    golden("epilogue_gate.txt", epilogue_struct(GATE, 2, 0))
    golden("epilogue_bias_residual.txt", epilogue_struct(BIAS_RESIDUAL, 1, 2))
    golden("elementwise_scaled_tanh.txt", elementwise_struct(SCALED, 1))


def test_source_is_the_golden_text(golden):
    made = source()
    golden("source.cu", made.code)
    golden("plan.cuh", made.headers[0][1])


def test_only_whole_identifiers_are_renamed():
    made = source()
    code, header = made.code, made.headers[0][1]
    assert "Planner" in code and "replan" in code and f"Plan_{made.digest}::threads" in code and f"struct Plan_{made.digest} {{" in header
    assert f"first_kernel_{made.digest}(" in code and f"first_kernel_tail_{made.digest}(" in code


def test_launches_name_the_renamed_entries():
    made = source(launches=[launch("first_kernel_tail"), launch()])
    assert [one.entry for one in made.launches] == [f"first_kernel_tail_{made.digest}", f"first_kernel_{made.digest}"]
    assert all(f"{one.entry}(" in made.code for one in made.launches)


def test_digest_follows_text_and_not_shapes():
    other_grid = source(launches=[Launch(entry="first_kernel", grid=(7, 1, 1), block=(32, 1, 1), arguments=())])
    assert other_grid.digest == source().digest
    assert source(plan={"T": "float", "threads": 64}).digest != source().digest
    assert source(epilogue=epilogue_struct(None, 1, 2)).digest != source().digest


def test_features_are_sorted_and_unique():
    made = source(features=[Feature.MBARRIER, Feature.BULK_COPY, Feature.MBARRIER])
    assert made.features == (Feature.BULK_COPY, Feature.MBARRIER)


@pytest.mark.parametrize("make", [
    lambda: epilogue_struct(GATE, 1, 0),  # acc1 does not exist
    lambda: epilogue_struct(Expression(arguments=("in0",)), 1, 1),  # not an epilogue argument
    lambda: epilogue_struct(Expression(arguments=()), 1, 0),  # no result
    lambda: epilogue_struct(Expression(arguments=("acc0",), operations=(Operation(K.ADD, ("acc0",)),)), 1, 0),
    lambda: epilogue_struct(Expression(arguments=("acc0",), operations=(Operation(K.NEG, (0,)),)), 1, 0),
    lambda: epilogue_struct(Expression(arguments=("acc0",), operations=(Operation(K.NEG, ("aux0",)),)), 1, 1),
    lambda: plan_struct({"a b": 1}),
    lambda: plan_struct({"T": "int; evil"}),
    lambda: source(launches=[launch("absent_kernel")]),
])
def test_malformed_input_is_refused(make):
    with pytest.raises(ContractError):
        make()


@given(st.floats(width=32))
def test_literals_are_exact(value):
    text = literal(value)
    if math.isnan(value) or math.isinf(value):
        bits = int(text[text.index("0x"):-1], 16)
        back = struct.unpack("<f", struct.pack("<I", bits))[0]
        assert back == value or (math.isnan(back) and math.isnan(value))
    else:
        assert text.endswith("f") and float(text[:-1]) == value


# ---- the text is C++ that computes the expression: compiled by the host compiler with stand-ins for the device library

HOST = """
#include <cmath>
#include <cstdio>
#define __device__
#define __forceinline__ inline
struct Plan { using T = float; };
namespace ac {
template <class T> float round_to(float x) { return std::round(x); }
inline float silu(float x) { return x / (1.0f + std::exp(-x)); }
inline float gelu(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678f)); }
inline float gelu_tanh(float x) { return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x))); }
inline float relu(float x) { return x < 0 ? 0 : x; }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float tanh(float x) { return std::tanh(x); }
inline float smaller(float a, float b) { return a != a || a < b ? a : b; }
inline float greater(float a, float b) { return a != a || a > b ? a : b; }
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
"""
PYTHON = {
    K.ADD: lambda a, b: a + b, K.SUB: lambda a, b: a - b, K.MUL: lambda a, b: a * b, K.DIV: lambda a, b: a / b,
    K.NEG: lambda a: -a, K.SILU: lambda a: a / (1 + math.exp(-a)), K.RELU: lambda a: max(a, 0.0),
    K.GELU: lambda a: 0.5 * a * (1 + math.erf(a / math.sqrt(2))), K.SIGMOID: lambda a: 1 / (1 + math.exp(-a)),
    K.GELU_TANH: lambda a: 0.5 * a * (1 + math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
    K.TANH: math.tanh, K.EXP: math.exp, K.RSQRT: lambda a: 1 / math.sqrt(a), K.ROUND: lambda a: math.copysign(math.floor(abs(a) + 0.5), a),
    K.ABS: abs, K.SQRT: math.sqrt, K.LOG: math.log, K.LOG1P: math.log1p, K.EXPM1: math.expm1, K.ERF: math.erf, K.SIN: math.sin,
    K.COS: math.cos, K.FLOOR: math.floor, K.MIN: min, K.MAX: max, K.GREATER: lambda a, b: float(a > b),
    K.AT_LEAST: lambda a, b: float(a >= b), K.EQUAL: lambda a, b: float(a == b), K.WHERE: lambda a, b, c: b if a else c,
}


def evaluate(expression, values):
    results = []
    for op in expression.operations:
        read = [values[o] if isinstance(o, str) else results[o] if type(o) is int else o for o in op.operands]
        results.append(PYTHON[op.kind](*read))
    return results[-1] if results else values[expression.arguments[0]]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host C++ compiler")
def test_functors_compute_their_expressions(tmp_path):
    every = [Expression(arguments=("acc0", "acc1", "aux0", "aux1"), operations=(
        Operation(kind, ("acc0", "aux1", "acc0")[: kind.arity]), Operation(K.SUB, (0, 0.25)))) for kind in PointwiseKind]
    expressions = [*every, GATE, BIAS_RESIDUAL]
    acc, aux = (1.3, -0.7), (0.4, 2.6)
    assert epilogue_struct(every[list(PointwiseKind).index(K.MIN)], 2, 2).startswith(ORDERING)
    parts, calls = [HOST], []
    for i, expression in enumerate(expressions):
        parts.append(epilogue_struct(expression, 2, 2).replace("Epilogue", f"Epilogue{i}").removeprefix(ORDERING))
        calls.append(f'std::printf("%.9g\\n", Epilogue{i}::apply(acc, aux));')
    arrays = f"const float acc[] = {{{acc[0]}f, {acc[1]}f}}; const float aux[] = {{{aux[0]}f, {aux[1]}f}};"
    parts.append(f"int main() {{ {arrays} {' '.join(calls)} }}")
    (tmp_path / "functors.cpp").write_text("\n".join(parts))
    subprocess.run(["g++", "-std=c++17", "-o", tmp_path / "functors", tmp_path / "functors.cpp"], check=True)
    printed = subprocess.run([tmp_path / "functors"], check=True, capture_output=True, text=True).stdout.split()
    values = dict(zip(("acc0", "acc1", "aux0", "aux1"), (*acc, *aux)))
    for expression, text in zip(expressions, printed, strict=True):
        assert float(text) == pytest.approx(evaluate(expression, values), rel=1e-5), expression


def test_headers_beside_the_template_travel_with_the_source(tmp_path):
    (tmp_path / "a.cu").write_text(TEMPLATE.replace('#include "plan.cuh"', '#include <agentcompile/ptx.cuh>\n#include "first.cuh"'))
    (tmp_path / "first.cuh").write_text('#include "plan.cuh"\n#include "second.cuh"\nusing Value = Plan::T;\n')
    (tmp_path / "second.cuh").write_text('#pragma once\n#include "first.cuh"\n')
    arguments = {"plan": {"T": "float", "threads": 32}, "launches": [launch()]}
    made = make_source(tmp_path / "a.cu", **arguments)
    assert [name for name, _ in made.headers] == ["plan.cuh", "first.cuh", "second.cuh"]
    assert f"using Value = Plan_{made.digest}::T;" in dict(made.headers)["first.cuh"]
    other = tmp_path / "other"
    other.mkdir()
    for name in ("a.cu", "first.cuh", "second.cuh"):
        (other / name).write_text((tmp_path / name).read_text() + "\n" * (name == "second.cuh"))
    assert make_source(other / "a.cu", **arguments).digest != made.digest
    (other / "b.cu").write_text('#include "absent.cuh"\n' + TEMPLATE)
    with pytest.raises(ContractError, match=r'b.cu includes "absent.cuh", which is not beside it'):
        make_source(other / "b.cu", **arguments)


def test_lengths_that_models_have_are_constants_and_no_others() -> None:
    """What is no constant shares one kernel: a test or an odd shape makes none of its own."""
    constants = (128, 192, 256, 768, 2048, 2880, 4096, 151936)
    assert [known_length(columns) for columns in constants] == list(constants)
    assert not any(map(known_length, (0, 1, 33, 64, 100, 127, 129, 1000, 2063)))
