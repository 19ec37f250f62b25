"""vLLM in a process of its own, imported from the folder that is first on the path; asked for greedy generations by token ids.

The argument is JSON: the folder of the model's configuration, its type, the most positions, the token counts to capture graphs for and
further arguments of ``vllm.LLM``. Weights are random; prompts are not kept between requests; nothing is tokenized.
"""

import json
import os
import sys
import time
from importlib import metadata
from typing import Any

import serving

sys.path.pop(0)  # this folder: no module of ours may stand in for one of vLLM's
QUIET = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
         "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
SHARE = 0.3  # of the GPU's memory, for weights and cache: others hold theirs on the same GPU


def settings(terms: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``: its best setting for one request at a time.

    That is compiled, with full CUDA graphs for steps and graphs of pieces for short prompts, FlashAttention, and the next step
    scheduled while one runs.
    """
    return {"model": terms["model"], "dtype": terms["dtype"], "max_model_len": terms["context"], "max_num_seqs": 1, "seed": 0,
            "load_format": "dummy", "skip_tokenizer_init": True, "generation_config": "vllm", "enable_prefix_caching": False,
            "gpu_memory_utilization": SHARE, "attention_config": {"backend": "FLASH_ATTN"}, "async_scheduling": True,
            "disable_log_stats": True, "compilation_config": {"cudagraph_capture_sizes": terms["captured"]}, **terms["more"]}


def versions() -> dict[str, str]:
    """Versions of what runs here, as installed."""
    found = {}
    for package in ("vllm", "torch", "transformers", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def start() -> tuple[dict[str, Any], Any]:
    """Load, compile and capture; then time one request per question."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    given = settings(json.loads(sys.argv[1]))
    engine = LLM(**given)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        prompt, count = {"prompt_token_ids": request["prompt"]}, request["new"]
        asked = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = engine.generate([prompt], asked, use_tqdm=False)
        spent_ms = (time.perf_counter() - began) * 1e3
        tokens = outputs[0].outputs[0].token_ids  # on the host: the request is over
        if len(tokens) != count:
            raise RuntimeError(f"{len(tokens)} tokens came where {count} were asked for")
        return {"ms": spent_ms}

    return {"versions": versions(), "settings": {key: value for key, value in given.items() if key != "model"}}, answer


if __name__ == "__main__":
    sys.exit(serving.serve(start))
