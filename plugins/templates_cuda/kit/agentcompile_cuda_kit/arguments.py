"""Arguments of launches as families pass them."""

from agentcompile_core.plugin_api import KernelArgument, Match, null, pointer


def operand_pointer(match: Match, name: str) -> KernelArgument:
    """The pointer to an operand of the match, with its access, or null where the match does not have it."""
    operand = match.operand(name)
    return null(name) if operand is None else pointer(name, operand.role, operand.spec.dtype, operand.access)
