"""The only names of plugins and languages that the core holds: what is meant where nobody says anything else."""

LANGUAGE = "cuda"  # of sources and families that do not name theirs
VALIDATORS = ("numerics",)
LIBRARIES = "cuda|cudnn|miopen|mkldnn|mps|fbgemm"  # how torch's operators of one device or library begin: no graph may call them
WINNERS = ("emulation",)  # asked about winners where they are installed, kernels are measured, and the time allows
SANITIZER = "sanitizer"  # asked about winners where the user wants it
