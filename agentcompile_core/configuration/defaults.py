"""The only names of plugins and languages that the core holds: what is meant where nobody says anything else."""

LANGUAGE = "cuda"  # of sources and families that do not name theirs
VALIDATORS = ("numerics",)
LIBRARIES = "cuda|cudnn|miopen|mkldnn|mps|fbgemm"  # how torch's operators of one device or library begin: no graph may call them
WINNERS = ("all",)  # every installed validator of winners that may be asked without being named
SANITIZER = "sanitizer"  # asked about winners where the user wants it
PREFILL = "live"  # what prompt chunks behind the first one attend over; "capacity": the whole cache, under a mask
