"""Two families in C: linear layers for one token, and pointwise expressions."""

import math
from pathlib import Path
from typing import Literal

from agentcompile_core import plugin_api as ac

K = ac.PointwiseKind
HERE = Path(__file__).parent


def literal(value: float) -> str:
    """A C float with exactly that value."""
    return f"{value!r}f" if math.isfinite(value) else "NAN" if math.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"


C = ac.Dialect(name="c", literal=literal, local="const float {name} = {value};", operations={
    K.ADD: "{0} + {1}", K.SUB: "{0} - {1}", K.MUL: "{0} * {1}", K.DIV: "{0} / {1}", K.NEG: "-({0})", K.EXP: "expf({0})",
    K.SIGMOID: "1.0f / (1.0f + expf(-({0})))", K.SILU: "{0} / (1.0f + expf(-({0})))", K.TANH: "tanhf({0})", K.ROUND: "{0}",
    K.RELU: "({0} < 0.0f ? 0.0f : {0})", K.RSQRT: "1.0f / sqrtf({0})", K.GELU: "0.5f * {0} * erfcf(-0.70710678f * {0})",
})


class InC(ac.TemplateFamily):
    """What both share: float32 operands, one launch of one thread, the epilogue as C text."""

    language = "c"

    def accepts(self, match: ac.Match, target: ac.Target) -> Literal[True] | ac.Reject:
        """True for float32 matches of the family's kind with operations that C has a word for."""
        if match.kind != self.kind:
            return ac.Reject(f"{self.name} serves {self.kind} matches, not {match.kind}")
        if any(operand.spec.dtype is not ac.DType.F32 for operand in match.operands):
            return ac.Reject(f"{self.name} serves float32 operands only")
        unknown = [o.kind.value for o in (match.epilogue.operations if match.epilogue else ()) if o.kind not in C.operations]
        return ac.Reject(f"{self.name} has no C for {', '.join(unknown)}") if unknown else True

    def space(self, match: ac.Match, target: ac.Target) -> ac.ScheduleSpace:
        """Partial sums per row: as many as the target has lanes, or one."""
        values = tuple(dict.fromkeys((target.lanes, 1))) if match.kind == ac.LINEAR else (1,)
        points = tuple(ac.Schedule({"lanes": v}) for v in values)
        return ac.ScheduleSpace(parameters=(ac.Parameter(name="lanes", values=values),), points=points)

    def source(self, match: ac.Match, names: dict[str, str], defines: dict[str, object], depth: int) -> ac.StepSource:
        """The template behind its defines; ``names`` spells what the epilogue reads."""
        inputs = [o for o in match.operands if o.role is not ac.Role.OUTPUT]
        body, result = [], next(iter(names.values()))
        if match.epilogue is not None:
            printed = ac.print_expression(match.epilogue, C, names)
            body, result = list(printed.lines), printed.result
        parameters = ", ".join([*(f"const float* {o.name}" for o in inputs), "float* out"])
        given = {**defines, "PARAMETERS": parameters, "EPILOGUE": " ".join([*body, f"const float result = {result};"])}
        code = "".join(f"#define {name} {value}\n" for name, value in given.items()) + (HERE / f"{self.name}.c").read_text()
        digest = ac.source_digest(code, language="c")
        arguments = (*(ac.pointer(o.name, o.role, o.spec.dtype) for o in inputs),
                     *(ac.pointer(o.name, o.role, o.spec.dtype, ac.Access.WRITE) for o in match.operands if o.role is ac.Role.OUTPUT))
        launch = ac.Launch(entry=f"{self.name}_{digest}", grid=(1, 1, 1), block=(1, 1, 1), arguments=arguments)
        text = ac.rename(code, [self.name], digest)
        return ac.StepSource(language="c", digest=digest, code=text, launches=(launch,), reduction_depth=depth)


class LinearInC(InC):
    """``linear`` matches without a norm before them: out[i] = epilogue(dot of one weight row, or of two, with x)."""

    name, version, kind = "c_linear", 1, ac.LINEAR

    def accepts(self, match: ac.Match, target: ac.Target) -> Literal[True] | ac.Reject:
        """As ``InC``, without a prologue and for one token."""
        if match.kind == ac.LINEAR and (match.text("norm", "none") != "none" or match.need("x").spec.numel != match.integer("k")):
            return ac.Reject("c_linear serves one token, with nothing before the product")
        return super().accepts(match, target)

    def lower(self, match: ac.Match, schedule: ac.Schedule, target: ac.Target) -> ac.StepSource:
        """One dot product after the other."""
        n, k, lanes = (*(match.integer(name) for name in "nk"), schedule.integer("lanes"))
        names = {f"acc{p}": f"acc{p}" for p in range(match.integer("pair", 1))}
        names |= {o.name: f"{o.name}[i]" for o in match.operands if o.name.startswith("aux")}
        return self.source(match, names, {"N": n, "K": k, "PAIR": match.integer("pair", 1), "LANES": lanes}, depth=-(-k // lanes) + lanes)


class ElementwiseInC(InC):
    """``elementwise`` matches: out[i] = epilogue(in0, in1, ...), each input full, one row or a scalar."""

    name, version, kind = "c_elementwise", 1, ac.ELEMENTWISE

    def lower(self, match: ac.Match, schedule: ac.Schedule, target: ac.Target) -> ac.StepSource:
        """One loop."""
        index = {"full": "i", "row": f"i % {match.integer('columns')}", "scalar": "0"}
        inputs = enumerate(o.name for o in match.operands if o.role is not ac.Role.OUTPUT)
        names = {name: f"{name}[{index[match.text(f'broadcast{j}', 'full')]}]" for j, name in inputs}
        return self.source(match, names, {"COUNT": match.integer("count")}, depth=max(1, len(match.epilogue.operations)))
