"""What a weight of a graph is of its model: a parameter by its qualified name, or the transposition of one."""

_TRANSPOSED = "..T"  # behind a name; no part of a qualified name is empty, so no parameter is called like that


def transposed(parameter: str) -> str:
    """The source, and name, of the value that is the transposition of a parameter."""
    return parameter + _TRANSPOSED


def parameter_of(source: str) -> tuple[str, bool]:
    """The qualified name of the parameter that ``source`` is, and whether it is the transposition of it."""
    return source.removesuffix(_TRANSPOSED), source.endswith(_TRANSPOSED)
