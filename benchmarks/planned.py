import sys, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import torch, transformers
from covered import plans
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.ir.graph import Workload, DType
transformers.logging.set_verbosity_error()
t=time.time()
ctx=plans.context("cuda/h200")
for name in sys.argv[1:]:
    t=time.time()
    config=transformers.CONFIG_MAPPING[name]()
    with torch.device("meta"):
        model=transformers.AutoModelForCausalLM.from_config(config,dtype=torch.bfloat16).eval()
    t1=time.time()
    graphs=capture_language_model(model,name,Workload(dtype=DType.BF16,max_context=4096,prefill_chunks=()))
    t2=time.time()
    if not graphs.graphs: print(name, graphs.eager_reason, t2-t1); continue
    r=plans.planned(graphs,ctx)
    print(name, round(t1-t,1), round(t2-t1,1), round(time.time()-t2,1), r, flush=True)
