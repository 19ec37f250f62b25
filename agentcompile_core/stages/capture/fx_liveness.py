"""Which nodes of a traced program anything is made from."""

from torch.fx import Node as FxNode


def live_nodes(nodes: list[FxNode]) -> set[str]:
    """Names of the nodes that a result or a write is made from. What only checks or sizes something unused is not among them."""
    found: set[str] = set()
    for fx in reversed(nodes):
        schema = getattr(fx.target, "_schema", None)
        if fx.name in found or fx.op == "output" or (schema is not None and schema.is_mutable):
            found.add(fx.name)
            found.update(operand.name for operand in fx.all_input_nodes)
    return found
