#!/usr/bin/env python3
"""Train the bundled tiny model (examples/tiny_model) from text that Python and numpy carry.

Text (read from the running installation, never committed; 1.4 MB, 410 thousand tokens with Python 3.11 and numpy 2.4):
  * ``pydoc_data.topics``: the language reference as the standard library ships it;
  * the docstrings of the standard library's modules, found by parsing their sources;
  * the docstrings of the installed numpy, found the same way.
Only running prose is kept: examples, tables, grammars and parameter lists are dropped, hard line breaks joined.

Model: `Qwen3ForCausalLM`, 3.97 million parameters, tied embeddings, 4 query and 2 key/value heads of 64.
Tokenizer: byte-level BPE of 2048 entries trained on the same text, so any string round-trips.

Usage (writes config, fp16 weights and tokenizer into --out; the committed model's own command):
    python examples/train_tiny_model.py --steps 4000 --compile --out examples/tiny_model
That run took 57 minutes on one shared core (about 30 of computing) with torch 2.13. Its loss in nats a token went from
7.6 to 0.17 on the training text, 20 passes over it; on the held-out modules the best was 4.0 (step 750), the end 5.6.
This is meant: the model is too small to generalize from so little text, and one that half remembers loops under greedy
decoding, while one that remembers writes whole sentences with wide margins between the first and the second token.
``--minutes`` bounds the time: the learning rate then follows whichever of the two limits is nearer, and the weights
depend on the speed of the machine. With ``--steps`` alone the seed fixes the run on one machine and set of versions.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import pydoc_data.topics
import random
import re
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT = "<|endoftext|>"
VOCABULARY_SIZE = 2048
CONTEXT_TOKENS = 256
HELD_OUT_EVERY = 25
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})
REPORT_STEPS = 250
PLAIN_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'})
PROMPTS = ("When an exception", "The following", "If the")


class Limits(NamedTuple):
    """How long and in what batches to train; `minutes` may be infinite."""

    steps: int
    minutes: float
    rows: int
    compiled: bool


def prose_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of `text` that are running prose, each as one line."""
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.strip().splitlines()]
        if len(lines) > 1 and re.fullmatch(r"[*=~^+#-]{3,}", lines[1]):
            lines = lines[2:]
        paragraph = re.sub(r"^(?:[*-]|\d+\.) ", "", re.sub(r"\s+", " ", " ".join(lines)).strip())
        paragraph = re.sub(r":[\w:]+:`~?([^`]*)`", r'"\1"', paragraph).replace("``", '"').replace("`", '"')
        paragraph = re.sub(r"\*{1,2}(\w+)\*{1,2}", r"\1", paragraph.translate(PLAIN_QUOTES))  # no emphasis marks
        paragraph = re.sub(r"(?<=[a-z]-) (?!and |or )| \[\d+\]_?", "", paragraph)  # joined hyphens, no footnotes
        if is_prose(paragraph):
            yield paragraph


def is_prose(paragraph: str) -> bool:
    """Whether `paragraph` is at least one whole sentence made mostly of words."""
    if len(paragraph) < 50 or not paragraph[0].isupper() or paragraph[-1] != ".":
        return False
    if any(mark in paragraph for mark in (">>>", "::=", "---", "===", " = ", "http", " : ", "|", "\\", ".. ")):
        return False
    if re.match(r"(Changed|New|Deprecated) in version|(Args|Arguments|Raises|Returns|Examples?):", paragraph):
        return False
    words = paragraph.split()
    plain = sum(re.fullmatch(r"[\"'(]?[A-Za-z][a-z'-]*[\"')]?[.,;:]?", word) is not None for word in words)
    return plain >= 0.75 * len(words) and all(len(word) < 30 for word in words)


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of one source file in the file's order; a file that does not parse has none."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text:
            yield text
        elif isinstance(node, ast.Call):  # numpy attaches many docstrings by add_newdoc(module, name, text)
            for argument in node.args:
                pieces = argument.elts if isinstance(argument, ast.Tuple) else [argument]
                for piece in pieces:
                    if isinstance(piece, ast.Constant) and isinstance(piece.value, str) and len(piece.value) > 200:
                        yield piece.value


def package_documents(root: Path) -> Iterator[str]:
    """Yield the prose of every module under `root`, one document a module, each paragraph once."""
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        paragraphs = [p for text in docstrings(path) for p in prose_paragraphs(text)]
        fresh = [p for p in dict.fromkeys(paragraphs) if p not in seen]
        seen.update(fresh)
        if fresh:
            yield "\n\n".join(fresh)


def collect_text() -> tuple[list[str], list[str]]:
    """Return (training documents, held-out documents); the held-out ones are modules, never language topics."""
    topics = ["\n\n".join(prose_paragraphs(text)) for _, text in sorted(pydoc_data.topics.topics.items())]
    topics = [text for text in topics if text]
    modules = list(package_documents(Path(sysconfig.get_paths()["stdlib"])))
    modules += package_documents(Path(numpy.__file__).parent)
    held_out = modules[::HELD_OUT_EVERY]
    training = topics + [m for i, m in enumerate(modules) if i % HELD_OUT_EVERY]
    print(
        f"text: {sum(map(len, topics)) / 1e6:.2f} MB of topics, "
        f"{sum(map(len, modules)) / 1e6:.2f} MB of docstrings, {sum(map(len, held_out)) / 1e6:.2f} MB of it held out"
    )
    return training, held_out


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Train the byte-level BPE tokenizer; id 0 is the end of text, all 256 bytes are in the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str], seed: int) -> torch.Tensor:
    """Return the documents in a seeded order as one int64 vector of token ids, an end of text after each."""
    shuffled = random.Random(seed).sample(documents, len(documents))
    ids = [token for text in shuffled for token in [*tokenizer.encode(text).ids, 0]]
    return torch.tensor(ids, dtype=torch.int64)


def model_config() -> Qwen3Config:
    """Return the architecture: 3.97 million parameters, every row of a weight a multiple of 16 bytes in fp16."""
    return Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=True,
    )


def optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for the embedding and the norms; `initial_lr` in each group.

    Muon is known to need fewer tokens than AdamW alone; the two were not compared on this text.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    chosen: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=0.01, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in chosen:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return chosen


def schedule(progress: float) -> float:
    """Return the learning-rate factor at `progress` in 0..1: a short linear warm-up, then a cosine down to 2 %."""
    if progress < 0.02:
        return max(progress / 0.02, 0.02)
    return 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def loss_of(model: Qwen3ForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token loss in nats of `batch`, int64 [rows, tokens + 1]; matmuls run in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, ids: torch.Tensor) -> float:
    """Return the mean loss in nats a token over consecutive windows of the held-out text."""
    rows = ids[: ids.numel() // (CONTEXT_TOKENS + 1) * (CONTEXT_TOKENS + 1)].view(-1, CONTEXT_TOKENS + 1)[:48]
    return loss_of(model, rows).item()


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model as fp16 safetensors (the tied head once), its configuration and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {n: p.detach().to(torch.float16).contiguous() for n, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.dtype = torch.float16
    model.config.save_pretrained(folder)
    GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0, do_sample=False).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position_embeddings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def show_samples(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """Print 200 greedy tokens for each of `PROMPTS`."""
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        out = model.generate(ids, max_new_tokens=200, do_sample=False, pad_token_id=0)
        print(f"> {tokenizer.decode(out[0].tolist())!r}", flush=True)


def train(model: Qwen3ForCausalLM, ids: torch.Tensor, held_out_ids: torch.Tensor, limits: Limits) -> Iterator[int]:
    """Train in place on random windows of `ids`; yield the step count after every `REPORT_STEPS` steps, reported."""
    step_loss = torch.compile(loss_of, dynamic=False) if limits.compiled else loss_of
    chosen = optimizers(model)
    window = torch.arange(CONTEXT_TOKENS + 1)
    smooth_loss = math.log(VOCABULARY_SIZE)
    start = time.monotonic()
    for step in range(limits.steps):
        minutes = (time.monotonic() - start) / 60
        progress = max(step / limits.steps, minutes / limits.minutes)
        if progress >= 1:
            return
        for group in (group for optimizer in chosen for group in optimizer.param_groups):
            group["lr"] = group["initial_lr"] * schedule(progress)
        offsets = torch.randint(ids.numel() - CONTEXT_TOKENS, (limits.rows, 1))
        loss = step_loss(model, ids[offsets + window])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
        smooth_loss += 0.05 * (loss.item() - smooth_loss)
        if (step + 1) % REPORT_STEPS == 0:
            held_out = held_out_loss(model, held_out_ids)
            print(f"step {step + 1}, {minutes:.1f} min, loss {smooth_loss:.3f}, held out {held_out:.3f}", flush=True)
            yield step + 1


def main(argv: list[str] | None = None) -> None:
    """Run the command line; bad options end it with code 2."""
    parser = argparse.ArgumentParser(description="Train the bundled tiny model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, also after every report")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end within this time")
    parser.add_argument("--rows", type=int, default=8, help="windows of text in a step")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and windows")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--compile", action="store_true", help="use torch.compile (needs a C++ compiler; a third faster)")
    arguments = parser.parse_args(argv)
    for name in ("steps", "minutes", "rows", "threads"):
        if getattr(arguments, name) <= 0:
            parser.error(f"--{name} is {getattr(arguments, name)} and must be above 0")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)

    training, held_out = collect_text()
    tokenizer = train_tokenizer(training)
    ids, held_out_ids = encode(tokenizer, training, arguments.seed), encode(tokenizer, held_out, arguments.seed)
    model = Qwen3ForCausalLM(model_config())
    print(f"{ids.numel()} training tokens, {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    limits = Limits(arguments.steps, arguments.minutes, arguments.rows, arguments.compile)
    for _ in train(model, ids, held_out_ids, limits):
        save(model, tokenizer, arguments.out)
    save(model, tokenizer, arguments.out)
    print(f"end: held out {held_out_loss(model, held_out_ids):.3f} nats a token", flush=True)
    show_samples(model, tokenizer)


if __name__ == "__main__":
    main()
