"""How near a plan is to what the hardware allows, by what its family foresees: spills, one block per SM, shared memory."""

from ...ir.plan import Needs, PlanRisk, RiskLevel
from ...ir.target import Target

SPILLS, CROWDED = 0.95, 0.8  # of the registers that a thread may have
NEARLY_ALL = 0.9  # of the shared memory of a block


def risk_of(needs: Needs, target: Target) -> PlanRisk:
    """The level, and every reason for it."""
    registers, most = needs.registers, needs.most_registers
    high = [f"about {registers} of at most {most} registers per thread: it may spill"] if most and registers >= SPILLS * most else []
    medium = [] if high or not most or registers < CROWDED * most else [f"about {registers} of at most {most} registers per thread"]
    if 0 < target.shared_bytes_per_block * NEARLY_ALL <= needs.shared_bytes:
        medium.append(f"{needs.shared_bytes} of {target.shared_bytes_per_block} bytes of shared memory per block")
    if blocks_per_sm(needs, target) == 1:
        medium.append(f"one block of {needs.threads} threads per SM: nobody fills its pauses")
    level = RiskLevel.HIGH if high else RiskLevel.MEDIUM if medium else RiskLevel.LOW
    return PlanRisk(level=level, reason="; ".join((*high, *medium)))


def blocks_per_sm(needs: Needs, target: Target) -> int:
    """How many blocks an SM holds at once, by registers, shared memory and threads; 0 where neither side says anything."""
    asked = ((needs.registers * needs.threads, target.registers_per_sm), (needs.shared_bytes, target.shared_bytes_per_sm),
             (needs.threads, target.threads_per_sm))
    return min((there // wanted for wanted, there in asked if wanted and there), default=0)
