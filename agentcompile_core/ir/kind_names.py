"""Names of the match kinds that the project's own families serve; what a kind means is said by the rule that offers it.

A family needs the name alone: it compares ``match.kind`` and depends on no other plugin. The first six are single-token (decode) kinds.
"""

LINEAR = "linear"
NORM = "norm"
ROPE = "rope"
ROPE_TABLE = "rope_table"
ATTENTION = "attention"
ELEMENTWISE = "elementwise"
GATHER = "gather"
ARGMAX = "argmax"
SOFTMAX = "softmax"
REDUCTION = "reduction"
SCAN = "scan"
RECURRENCE_STEP = "recurrence_step"
CONVOLUTION_STEP = "convolution_step"
POOL = "pool"
CROSS_ENTROPY = "cross_entropy"
MASKED_ATTENTION = "masked_attention"
MATMUL = "matmul"
EXPERT_LINEAR = "expert_linear"
ROUTER = "router"
