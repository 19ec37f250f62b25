"""ExportedProgram -> Graph: the same operators in the same order, over named values, with nothing of torch left."""

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.export
from attrs import evolve
from torch import Tensor
from torch.fx import Node as FxNode

from ...ir.graph import STATE_PREFIX, Argument, DType, Graph, GraphKind, Node, Ref, Symbol, TensorSpec, Value, ValueKind, refs_of
from ...ops.aliasing import written_in_place
from ...ops.schema import canonical, shared_arguments
from .attention import Unsupported
from .complex_numbers import in_real_numbers
from .export import Exported
from .fx_liveness import live_nodes
from .kinds import kind_of
from .storages import storage_of

NAMESPACES = ("aten", "prims", "agentcompile")
# Calls that check or annotate and compute nothing.
_SILENT = frozenset({"aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten._assert_async.msg"})


def spec_of(tensor: Tensor) -> TensorSpec:
    """Shape, type and, where not contiguous, strides of a (fake) tensor.

    Raises:
        Unsupported: a size depends on data, or the element type is not one of ours.
    """
    if not all(isinstance(extent, int) for extent in tensor.shape):
        raise Unsupported("a tensor's size depends on data")
    try:
        dtype = DType(str(tensor.dtype).removeprefix("torch."))
    except ValueError:
        raise Unsupported(f"it computes in {tensor.dtype}") from None
    strides = () if tensor.is_contiguous() else tuple(tensor.stride())
    return TensorSpec(shape=tuple(tensor.shape), dtype=dtype, strides=strides)


def layer_of(path: str) -> int:
    """Index of the repeated layer in a module path (``model.layers.3.mlp`` -> 3), -1 where there is none."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(found.group(1)) if found else -1


def import_program(exported: Exported, name: str, kind: GraphKind, tokens: int = 1) -> Graph:
    """Turn an exported program into a verified Graph.

    Weights are named by their first qualified name in the model (tied parameters once), buffers likewise, user inputs
    as ``exported.inputs`` says; those called ``session.*``, ``kv.*`` and ``state.*`` are states.

    Raises:
        Unsupported: an operator outside aten, prims and agentcompile, a data-dependent size, or a tensor constant.
    """
    in_real_numbers(exported.program)
    return _Importer(exported).run(name, kind, tokens)


class _Importer:
    def __init__(self, exported: Exported) -> None:
        self.exported = exported
        self.signature = exported.program.graph_signature
        self.values: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.renamed: dict[str, str] = {}  # fx node name -> value name
        self.kept: set[str] = set()  # names of tensors that its code or an attribute holds
        self.items: dict[str, tuple[str, ...]] = {}  # fx name of a node with several results -> value names

    def run(self, name: str, kind: GraphKind, tokens: int) -> Graph:
        self._placeholders()
        outputs: tuple[str, ...] = ()
        live = live_nodes(list(self.exported.program.graph.nodes))
        for fx in self.exported.program.graph.nodes:
            if fx.op == "call_function":
                if fx.name in live:
                    self._call(fx)
            elif fx.op == "output":
                outputs = self._outputs(fx)
            elif fx.op != "placeholder":
                raise Unsupported(f"its graph has a {fx.op} of {fx.target}")
        inputs = tuple(v.name for v in self.values.values() if v.kind is ValueKind.INPUT)
        graph = Graph(
            name=name, kind=kind, tokens=tokens, values=tuple(self.values.values()), nodes=tuple(self.nodes),
            inputs=inputs, outputs=outputs,
        ).verify()
        if self.kept and self.kept & written_in_place(graph):
            raise Unsupported("it writes to a tensor that it keeps in an attribute or in its code")
        return graph

    def _placeholders(self) -> None:
        placeholders = [n for n in self.exported.program.graph.nodes if n.op == "placeholder"]
        model = self.exported.model
        parameters = {id(p): name for name, p in model.named_parameters()}
        buffers = {id(b): name for name, b in model.named_buffers()}
        user_inputs = iter(self.exported.inputs)
        specs = self.signature.input_specs
        to_parameters, to_buffers = self.signature.inputs_to_parameters, self.signature.inputs_to_buffers  # made anew by every look
        constants = self.signature.inputs_to_lifted_tensor_constants
        given_names = {s.arg.name for s in specs if s.kind is torch.export.graph_signature.InputKind.USER_INPUT}
        for fx in placeholders:
            if fx.name in to_parameters:
                path = to_parameters[fx.name].removeprefix(self.exported.prefix)
                self._external(fx, parameters[id(model.get_parameter(path))], ValueKind.WEIGHT)
            elif fx.name in to_buffers:
                path = to_buffers[fx.name].removeprefix(self.exported.prefix)
                self._external(fx, buffers[id(model.get_buffer(path))], ValueKind.CONSTANT)
            elif fx.name in constants:
                self._constant(fx, constants[fx.name])
            elif fx.name in given_names:
                if not isinstance(fx.meta.get("val"), Tensor):
                    continue  # a number or None given as an example input; export wrote it into the graph
                given = next(user_inputs)
                state = given.startswith(("session.", "kv.", STATE_PREFIX))
                self._external(fx, given, ValueKind.STATE if state else ValueKind.INPUT)
            else:
                raise Unsupported(f"its graph takes {fx.name}, which is no tensor")

    def _external(self, fx: FxNode, name: str, kind: ValueKind) -> None:
        self.renamed[fx.name] = name
        source = "" if kind is ValueKind.INPUT else name
        spec = spec_of(fx.meta["val"])
        if kind is ValueKind.STATE:  # exported from one expanded element; the session allocates them contiguous
            spec = evolve(spec, strides=())
        self.values[name] = Value(name=name, spec=spec, kind=kind, source=source)

    def _constant(self, fx: FxNode, target: str) -> None:
        """A tensor literal inside the model's code: kept as an ``aten.full`` where all its elements are equal."""
        data = self.exported.program.constants[target]
        if not isinstance(data, Tensor) or data.is_meta or data.numel() == 0 or not _all_equal(data):
            raise Unsupported("its code holds a tensor literal")
        spec = spec_of(data)
        self.kept.add(fx.name)
        self.values[fx.name] = Value(name=fx.name, spec=spec)
        options = (("dtype", Symbol("dtype", spec.dtype.value)), ("device", Symbol("device", "model")))
        self.nodes.append(canonical(Node(
            name=fx.name, op="aten.full.default", kind="full", args=(spec.shape, _literal(data.flatten()[0].item())),
            kwargs=options, outputs=(fx.name,),
        )))

    def _call(self, fx: FxNode) -> None:
        if fx.target is operator.getitem:
            source: Any = fx.args[0]
            index: Any = fx.args[1]
            self.renamed[fx.name] = self.items[source.name][index]
            return
        op = _op_of(fx.target)
        if op in _SILENT:
            return
        path = _module_path(fx, self.exported.prefix)
        args = tuple(self._argument(a) for a in fx.args)
        kwargs = tuple((key, self._argument(a)) for key, a in fx.kwargs.items())
        outputs = self._results(fx)
        first = next((n for n in fx.all_input_nodes if isinstance(n.meta.get("val"), Tensor)), None)
        node = canonical(Node(
            name=fx.name, op=op, kind=kind_of(op, None if first is None else spec_of(first.meta["val"])), args=args,
            kwargs=kwargs, outputs=outputs, mutates=self._mutated(fx), module=path, layer=layer_of(path),
        ))
        self._check_memory(fx, node)
        self.nodes.append(node)

    def _check_memory(self, fx: FxNode, node: Node) -> None:
        """Refuse results that lie in the memory of an operand where the operator's schema, and what is known of it, say otherwise."""
        made = set() if node.mutates else _storages(fx)  # what is written is handed on
        shared = {name for given in shared_arguments(node) for name in refs_of(given)} if made else set()
        if any(self._name(source) not in shared and made & _storages(source) for source in fx.all_input_nodes):
            raise Unsupported(f"its {node.op.split('.')[1]} returns the memory of an operand, which its schema does not say")

    def _results(self, fx: FxNode) -> tuple[str, ...]:
        result = fx.meta.get("val")
        if result is None:
            return ()
        if isinstance(result, Tensor):
            self.values[fx.name] = Value(name=fx.name, spec=spec_of(result))
            return (fx.name,)
        if not isinstance(result, (tuple, list)) or not all(isinstance(item, Tensor) for item in result):
            raise Unsupported(f"{fx.target} makes a number from data")
        names = tuple(f"{fx.name}.{i}" for i in range(len(result)))
        for item_name, item in zip(names, result, strict=True):
            self.values[item_name] = Value(name=item_name, spec=spec_of(item))
        self.items[fx.name] = names
        return names

    def _mutated(self, fx: FxNode) -> tuple[str, ...]:
        found = []
        target: Any = fx.target
        for index, argument in enumerate(target._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = fx.args[index] if index < len(fx.args) else fx.kwargs.get(argument.name)
            if isinstance(given, FxNode):
                found.append(self._name(given))
        return tuple(found)

    def _name(self, fx: FxNode) -> str:
        return self.renamed.get(fx.name, fx.name)

    def _argument(self, given: Any) -> Argument:
        if isinstance(given, FxNode):
            return Ref(self._name(given))
        if isinstance(given, (tuple, list)):
            return tuple(self._argument(item) for item in given)
        return _literal(given)

    def _outputs(self, fx: FxNode) -> tuple[str, ...]:
        """The tensors that are returned, each once; None and numbers are left out (calls.py keeps where they belong)."""
        found = [name for name in returned(self.exported.program) if isinstance(name, str)]
        given: Any = fx.args[0]
        by_name = {n.name: n for n in given if isinstance(n, FxNode)}
        return tuple(self._name(by_name[name]) for name in dict.fromkeys(found))


def _all_equal(data: Tensor) -> bool:
    """Whether all elements are the same number, of which 0.0 and -0.0 are two."""
    first = data.flatten()[0]
    return bool((data == first).all()) and bool((data.signbit() == first.signbit()).all())


def _storages(fx: FxNode) -> set[int | None]:
    """Which memory the tensors of a node's value have, in the trace."""
    value = fx.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return {storage_of(t) for t in tensors if isinstance(t, Tensor) and t.numel()} - {None}


def returned(program: torch.export.ExportedProgram) -> list[str | tuple[Any]]:
    """The leaves of what a program returns, in order: the fx name of a tensor, or a constant as a tuple of one.

    Raises:
        Unsupported: it returns a number made from data.
    """
    leaves: list[str | tuple[Any]] = []
    for spec in program.graph_signature.output_specs:
        if spec.kind is torch.export.graph_signature.OutputKind.USER_OUTPUT:
            if isinstance(spec.arg, torch.export.graph_signature.TensorArgument):
                leaves.append(spec.arg.name)
            elif isinstance(spec.arg, torch.export.graph_signature.ConstantArgument):
                leaves.append((spec.arg.value,))
            else:
                raise Unsupported("it returns a number made from data")
    return leaves


def _op_of(target: Any) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        raise Unsupported(f"its graph calls {getattr(target, '__name__', target)}, which is not an operator")
    if target.namespace not in NAMESPACES:
        raise Unsupported(f"its graph calls {target}, outside aten, prims and agentcompile")
    return str(target)


def _module_path(fx: FxNode, prefix: str) -> str:
    stack = fx.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return re.sub(r"^(L\['self'\]\.)?" + re.escape(prefix), "", paths[-1] + ".").rstrip(".") if paths else ""


_SYMBOLS: tuple[tuple[type, str, Callable[[Any], str]], ...] = (
    (torch.dtype, "dtype", lambda x: str(x).removeprefix("torch.")),
    (torch.device, "device", lambda _: "model"),
    (torch.layout, "layout", lambda x: str(x).removeprefix("torch.")),
    (torch.memory_format, "memory_format", lambda x: str(x).removeprefix("torch.")),
)


def _literal(given: Any) -> Argument:
    if isinstance(given, float) and not math.isfinite(given):
        return Symbol("float", str(given))
    if given is None or isinstance(given, (bool, int, float, str)):
        return given
    for cls, kind, spell in _SYMBOLS:
        if isinstance(given, cls):
            return Symbol(kind, spell(given))
    raise Unsupported(f"an operator takes a {type(given).__name__}")
