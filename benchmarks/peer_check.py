"""Do peers start, and how fast are they? Only peers, nothing of ours: prints seconds to start, versions, first token and time per token.

    python benchmarks/peer_check.py qwen3-1.7b --peers vllm,torch_compile_loop --peer-path ~/peers/vllm_site
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import harness
from peers.child import PeerDied
from peers.command import workloads_of
from peers.systems import PEERS, Asked, Peers, prompts


def main(arguments: list[str] | None = None) -> int:
    """Start each peer alone, ask it for two whole generations and a first token; 1 where one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=harness.MODELS)
    parser.add_argument("--peers", default="vllm", help=f"some of {', '.join(PEERS)}, by commas")
    parser.add_argument("--workload", default="128/128")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peer-path", type=Path, action="append", default=[])
    parser.add_argument("--start-s", type=float, default=240.0)
    parser.add_argument("--vllm", type=json.loads, default={}, metavar="JSON")
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.peers.split(",") if name.strip()]
    unknown = [name for name in names if name not in PEERS]
    if unknown or not names:
        raise SystemExit(f"--peers {', '.join(unknown) or 'none'}: allowed are {', '.join(PEERS)}")
    workload = workloads_of(options.workload)[0]
    config = json.loads((harness.CONFIGS / options.model / "config.json").read_text())
    prompt_of, failed = prompts(config["vocab_size"]), False
    for name in names:
        asked = Asked(model=harness.CONFIGS / options.model, dtype=options.dtype, device=options.device, context=workload.positions,
                      inputs=(workload.input,), paths=tuple(options.peer_path), vllm=options.vllm, start_s=options.start_s, answer_s=600.0)
        began = time.monotonic()
        with Peers([name], asked) as peers:
            try:
                ask = peers.ask(name, prompt_of, workload.positions)
                print(f"{name}: started in {time.monotonic() - began:.1f} s, {json.dumps(peers.facts.get(name, {}))}", flush=True)
                cold = ask(workload.input, workload.output)
                e2e, first = ask(workload.input, workload.output), ask(workload.input, 1)
                print(f"{name} {workload}: cold {cold:.0f} ms, {e2e:.1f} ms, first token {first:.2f}, "
                      f"{(e2e - first) / (workload.output - 1):.3f} ms/token", flush=True)
            except PeerDied as exc:
                print(exc, *peers.log(name).splitlines()[-40:], sep="\n    ", flush=True)
                failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
