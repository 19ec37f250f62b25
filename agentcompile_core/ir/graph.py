"""The normalized IR: a Graph of nodes over named, typed values. A Graph alone can be run (see ``interpreter``)."""

import enum
import math
from collections.abc import Iterator, Mapping
from functools import cached_property

from attrs import Factory, evolve, field, frozen

from ..errors import VerificationError
from .frequencies import Frequencies, verify_frequencies


class DType(enum.Enum):
    """Element types; the value is torch's name of it."""

    F64 = "float64"
    F32 = "float32"
    F16 = "float16"
    BF16 = "bfloat16"
    I64 = "int64"
    I32 = "int32"
    I16 = "int16"
    I8 = "int8"
    U8 = "uint8"
    BOOL = "bool"

    @property
    def bytes(self) -> int:
        """Size of one element."""
        return {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}.get(self.value, 1)

    @property
    def is_float(self) -> bool:
        """Whether it is a floating point type."""
        return "float" in self.value


@frozen(kw_only=True)
class TensorSpec:
    """Shape and type of a tensor; ``strides`` in elements, empty for contiguous."""

    shape: tuple[int, ...]  # extents in elements
    dtype: DType
    strides: tuple[int, ...] = ()  # in elements; empty: row-major and contiguous

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous tensor of this spec."""
        return self.numel * self.dtype.bytes


class ValueKind(enum.Enum):
    """Who owns a value and whether it may change."""

    INPUT = "input"  # given by the caller or kept by the session (token ids, position)
    WEIGHT = "weight"  # a parameter of the model; named by its qualified name
    CONSTANT = "constant"  # a buffer of the model (RoPE frequencies)
    STATE = "state"  # mutated in place by declared effects (KV cache), owned by the session
    INTERMEDIATE = "intermediate"


@frozen(kw_only=True)
class Value:
    """One tensor of the graph. ``source`` is the model's qualified name of a weight, constant or state."""

    name: str  # unique in its graph
    spec: TensorSpec
    kind: ValueKind = ValueKind.INTERMEDIATE
    source: str = ""


@frozen
class Ref:
    """An argument that is a value of the graph."""

    value: str


@frozen
class Symbol:
    """A torch object that JSON lacks: kind in dtype, device, layout, memory_format; a device is always "model"."""

    kind: str
    name: str


OFFSET = "session.offset"  # i64 [1]: how much further than its row in the cache the position of a token is; 0 behind tokens alone
STATE_PREFIX = "state."  # of the sources of states of fixed size: state.conv.3.0

Argument = None | bool | int | float | str | Ref | Symbol | tuple["Argument", ...]


def refs_of(argument: Argument) -> Iterator[str]:
    """Names of the values inside an argument, in order."""
    if isinstance(argument, Ref):
        yield argument.value
    elif isinstance(argument, tuple):
        for item in argument:
            yield from refs_of(item)


def map_refs(argument: Argument, names: Mapping[str, str]) -> Argument:
    """The same argument with its value names replaced where ``names`` has them."""
    if isinstance(argument, Ref):
        return Ref(names.get(argument.value, argument.value))
    if isinstance(argument, tuple):
        return tuple(map_refs(item, names) for item in argument)
    return argument


@frozen(kw_only=True)
class Node:
    """One operator call.

    ``op`` is the exact overload (``aten.linear.default``), so the node can be run; ``kind`` is the normalized word that rules match
    (``linear``). Arguments have one form, that of ``schema.canonical``: those before the schema's keyword-only marker are positional,
    without trailing ones that equal their defaults; keyword-only ones follow in schema order, without those that equal their defaults.
    ``schema.argument`` reads one by its name, with the schema's default; nothing else knows positions or defaults. ``outputs`` names one
    value per returned tensor; ``mutates`` names the operands that the call writes in place. ``module`` is the path of the module that made
    the call, ``layer`` the index of the repeated layer it belongs to (-1: none).
    """

    name: str
    op: str  # full name, such as aten.linear.default
    kind: str  # the word that rules look at, such as linear
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[str, ...]  # names of the values it defines
    mutates: tuple[str, ...] = ()  # names of the values it writes in place
    module: str = ""  # qualified name of the module it came from
    layer: int = -1

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read, in argument order, without repetition."""
        given = (*self.args, *(value for _, value in self.kwargs))
        return tuple(dict.fromkeys(name for argument in given for name in refs_of(argument)))


class GraphKind(enum.Enum):
    """What one run of a graph does."""

    DECODE = "decode"  # one token in, logits and the next token out
    PREFILL = "prefill"  # a chunk of the prompt in, logits of its last valid position out
    FORWARD = "forward"  # a plain module


@frozen(kw_only=True)
class Graph:
    """Nodes in topological order over named values. ``tokens`` is the number of positions one run processes."""

    name: str
    kind: GraphKind
    tokens: int = 1
    values: tuple[Value, ...]  # all of them, given and computed
    nodes: tuple[Node, ...]  # in an order in which they can run
    inputs: tuple[str, ...]  # names of values
    outputs: tuple[str, ...]  # names of values

    @cached_property
    def by_name(self) -> dict[str, Value]:
        """Values by name."""
        return {value.name: value for value in self.values}

    @cached_property
    def node_by_name(self) -> dict[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def producer(self) -> dict[str, Node]:
        """The node that defines each intermediate value."""
        return {name: node for node in self.nodes for name in node.outputs}

    @cached_property
    def users(self) -> dict[str, tuple[Node, ...]]:
        """The nodes that read each value, in order."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in node.inputs:
                found.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    @cached_property
    def kept(self) -> tuple[Value, ...]:
        """The states of fixed size that each run hands to the next beside K and V, written in place; zero before a prompt."""
        return tuple(v for v in self.values if v.kind is ValueKind.STATE and v.source.startswith(STATE_PREFIX))

    def spec(self, name: str) -> TensorSpec:
        """The spec of the value called ``name``."""
        return self.by_name[name].spec

    def kind_of(self, name: str) -> ValueKind:
        """The kind of the value called ``name``."""
        return self.by_name[name].kind

    def sub(self, node_names: tuple[str, ...], name: str, outputs: tuple[str, ...] | None = None) -> "Graph":
        """The graph of ``node_names`` alone; what it reads from outside becomes an input (weights and states keep their kind)."""
        wanted = set(node_names)
        nodes = tuple(node for node in self.nodes if node.name in wanted)
        inside = {out for node in nodes for out in node.outputs}
        reads = tuple(dict.fromkeys(name for node in nodes for name in node.inputs if name not in inside))
        if outputs is None:
            outputs = tuple(out for node in nodes for out in node.outputs
                            if out in self.outputs or any(user.name not in wanted for user in self.users.get(out, ())))
        values = []
        for value_name in (*reads, *(out for node in nodes for out in node.outputs)):
            value = self.by_name[value_name]
            outside = value_name not in inside and value.kind is ValueKind.INTERMEDIATE
            values.append(evolve(value, kind=ValueKind.INPUT) if outside else value)
        inputs = tuple(v.name for v in values if v.kind is ValueKind.INPUT)
        return Graph(name=name, kind=self.kind, tokens=self.tokens, values=tuple(values), nodes=nodes, inputs=inputs, outputs=outputs)

    def verify(self) -> "Graph":
        """Check single assignment, definition before use and known names; return self.

        Raises:
            VerificationError: an invariant does not hold; the message names the node.
        """
        defined = {value.name for value in self.values if value.kind is not ValueKind.INTERMEDIATE}
        if len(self.by_name) != len(self.values):
            raise VerificationError(f"graph {self.name}: two values share a name")
        for node in self.nodes:
            for name in (*node.inputs, *node.mutates):
                if name not in defined:
                    raise VerificationError(f"graph {self.name}: node {node.name} reads {name!r} before it is defined")
            for name in node.outputs:
                if name in defined or name not in self.by_name:
                    raise VerificationError(f"graph {self.name}: node {node.name} defines {name!r} twice or without a value")
                defined.add(name)
        for name in (*self.inputs, *self.outputs):
            if name not in defined:
                raise VerificationError(f"graph {self.name}: {name!r} is an input or output but nothing defines it")
        return self


@frozen(kw_only=True)
class Workload:
    """What is compiled for. Batch 1; ``max_context`` positions of KV; prompts run in chunks of ``prefill_chunks`` tokens."""

    dtype: DType  # of weights and activations
    max_context: int  # positions, prompt included
    prefill_chunks: tuple[int, ...] = (128, 512)
    batch: int = 1


@frozen
class LayerHeads:
    """What one layer caches per position: ``kv_heads`` rows of ``head_dim`` elements of K and of ``value_dim`` elements of V."""

    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int


@frozen(kw_only=True)
class KVSpec:
    """Shape of the KV cache: per layer K [batch, capacity, kv_heads, head_dim] and V [batch, capacity, kv_heads, value_dim], one dtype."""

    layers: int
    kv_heads: int
    head_dim: int  # elements
    capacity: int  # positions
    dtype: DType
    value_dim: int = field(default=Factory(lambda self: self.head_dim, takes_self=True))  # elements; by default as K's
    others: tuple[LayerHeads, ...] = ()  # the layers whose heads are not these, by rising number

    @property
    def heads(self) -> tuple[LayerHeads, ...]:
        """Of every layer."""
        usual, others = (self.kv_heads, self.head_dim, self.value_dim), {one.layer: one for one in self.others}
        return tuple(others.get(layer) or LayerHeads(layer, *usual) for layer in range(self.layers))

    @property
    def key_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of K of every layer, batch 1."""
        return tuple((1, self.capacity, one.kv_heads, one.head_dim) for one in self.heads)

    @property
    def value_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of V of every layer, batch 1."""
        return tuple((1, self.capacity, one.kv_heads, one.value_dim) for one in self.heads)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of all layers, batch 1."""
        return sum(one.kv_heads * (one.head_dim + one.value_dim) for one in self.heads) * self.capacity * self.dtype.bytes


@frozen(kw_only=True)
class ModelInfo:
    """What identifies a model without its weights. ``config_json`` is canonical JSON; ``digest`` is over it and the parameter specs."""

    name: str
    model_type: str
    config_json: str = field(repr=False)
    digest: str  # of configuration and weights
    parameter_bytes: int
    vocab_size: int = 0  # token ids that it reads are below; 0: no language model
    limit: int = 0  # longest context the model itself allows; 0: none known


@frozen(kw_only=True)
class GraphSet:
    """All graphs of one model and workload. ``eager_reason`` says why a model runs on the framework alone (no graphs then)."""

    model: ModelInfo
    workload: Workload
    graphs: tuple[Graph, ...]
    kv: KVSpec | None = None
    eager_reason: str = ""  # why the framework runs instead; empty: it does not
    notes: tuple[str, ...] = ()  # sentences for the user
    call: str = ""  # of a plain module: the shape of its arguments and of what it returns (calls.py)
    whole_chunks: bool = False  # prompt chunks take no padding: what is left of a prompt goes through the decode step
    frequencies: tuple[Frequencies, ...] = ()

    def of_kind(self, kind: GraphKind) -> tuple[Graph, ...]:
        """The graphs of one kind, smallest number of tokens first."""
        return tuple(sorted((g for g in self.graphs if g.kind is kind), key=lambda g: g.tokens))

    @cached_property
    def states(self) -> dict[str, TensorSpec]:
        """What ``Graph.kept`` says of all graphs, by source."""
        return {value.source: value.spec for graph in self.graphs for value in graph.kept}

    @cached_property
    def zeroed(self) -> dict[str, TensorSpec]:
        """What is zero before a prompt, by source: ``states``, and the ``OFFSET`` of a step that is told one."""
        return self.states | {v.source: v.spec for graph in self.graphs for v in graph.values if v.source == OFFSET}

    def verify(self) -> "GraphSet":
        """Verify all; return self. Raises VerificationError: a graph or name is wrong, two make tokens, or frequencies are of no buffer."""
        names = [graph.verify().name for graph in self.graphs]
        for graph in self.of_kind(GraphKind.PREFILL):
            if (said := graph.name.removeprefix("prefill_").removesuffix("_fresh")).isdecimal() and said != str(graph.tokens):
                raise VerificationError(f"the graph of a chunk of {graph.tokens} tokens is called {graph.name!r}")
        if len(set(names)) < len(names):
            raise VerificationError(f"two graphs are called {next(n for n in names if names.count(n) > 1)!r}")
        if len(self.of_kind(GraphKind.DECODE)) > 1:
            raise VerificationError(f"{', '.join(g.name for g in self.of_kind(GraphKind.DECODE))} are all decode steps; a model has one")
        shapes = {v.source: v.spec.shape for graph in self.graphs for v in graph.values if v.kind is ValueKind.CONSTANT}
        verify_frequencies(self.frequencies, shapes)
        return self
