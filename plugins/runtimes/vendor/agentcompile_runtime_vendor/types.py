"""The element types that a library call can take: one of three for all that it reads and writes."""

from agentcompile_core.plugin_api import KERNEL_TYPES, Match, Role


def mixed(match: Match) -> str:
    """Why the types of a match are none that one library call serves; empty if they are. Positions are no numbers."""
    found = {operand.name: operand.spec.dtype for operand in match.operands if operand.role is not Role.LENGTH}
    if len(set(found.values())) == 1 and set(found.values()) <= set(KERNEL_TYPES):
        return ""
    named = ", ".join(f"{name} in {dtype.value}" for name, dtype in found.items())
    return f"{named}; a library call reads and writes one of {', '.join(dtype.value for dtype in KERNEL_TYPES)}"
