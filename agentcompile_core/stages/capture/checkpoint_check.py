"""What a checkpoint may not make transformers do: fetch or import something, or read anything but safetensors beside its configuration.

A folder is looked at before transformers sees it. A configuration is cleaned after it was read, which runs nothing, and before a
model is built from it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import UsageError

INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 64 << 20
# Pieces of a checkpoint that are loaded by pickling, or that name another checkpoint.
_REFUSED = {
    "adapter_config.json": "it is an adapter, which names the model that it is for; merge it into that model and save the result",
    ".metadata": "it is a distributed checkpoint, whose metadata is pickled; convert it to safetensors",
}
_ATTENTION = (None, "eager", "sdpa")
_EXPERTS = (None, "eager", "batched_mm", "grouped_mm")
# Everything in a configuration that makes transformers fetch, import or choose code: key -> what it is set to.
_STRIPPED: dict[str, Any] = {
    "auto_map": None, "custom_pipelines": None, "use_kernels": None, "kernel_config": None, "distributed_config": None,
    "custom_generate": None, "trust_remote_code": None, "use_pretrained_backbone": False, "transformers_weights": None,
}


def check_folder(folder: Path) -> None:
    """Look at the files of a checkpoint.

    Raises:
        UsageError: its index names something else than safetensors files beside it, a weight file is no regular file or a link that
            leads out of the folder, or there is something that is loaded by running it.
    """
    for name, why in _REFUSED.items():
        if (folder / name).is_file():
            raise UsageError(f"{folder} holds {name}: {why}")
    for index in sorted(folder.glob("*.safetensors.index.json")):
        check_index(index)
    for path in sorted(folder.glob("*.safetensors")):
        if not path.is_file():
            raise UsageError(f"{path} is no regular file; download it again")
        if not _is_at_home(path, folder):
            raise UsageError(f"{path} is a link to {path.resolve()}, outside of the model's folder; copy the file itself into it")


def check_index(path: Path) -> None:
    """The index of sharded weights: a map from parameters to names of safetensors files in its own folder.

    Raises:
        UsageError: it is anything else.
    """
    document = read_json(path)
    files = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(files, dict) or not files or not isinstance(document.get("metadata", {}), dict):
        raise UsageError(f"{path} is no index of safetensors: it has no weight_map; download it again")
    for name in dict.fromkeys(map(_text, files.values())):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors") or "\0" in name:
            raise UsageError(f"{path} names {name!r}; only names of .safetensors files beside it are read")


def read_json(path: Path) -> Any:
    """The document in a file of a checkpoint.

    Raises:
        UsageError: it is no JSON, too large or cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise UsageError(f"{path} is larger than {MAX_JSON_BYTES} bytes; it is no file of a model")
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{path} is not valid JSON ({exc}); download the file again") from exc
    except OSError as exc:
        raise UsageError(f"{path} cannot be read ({exc.strerror}); mend its permissions or download it again") from exc


def cleaned(config: Any, name: str, *, weights: bool) -> tuple[str, ...]:
    """Strip everything from ``config`` (a PretrainedConfig, changed in place) that fetches or imports; one note on what it was.

    Raises:
        UsageError: ``weights`` are to be read and the configuration says that they are quantized.
    """
    found: list[str] = []
    for part in _parts(config):
        found += _strip(part)
        if getattr(part, "quantization_config", None) is not None:
            if weights:
                raise UsageError(f"the weights of {name} are quantized ({_method(part)}), which only code of others can read; "
                                 "give a checkpoint in float16, bfloat16 or float32")
            del part.quantization_config
            found.append("quantization_config")
    if not found:
        return ()
    return (f"the configuration of {name} asks for {', '.join(dict.fromkeys(found))}, which would fetch or import code; ignored",)


def _strip(part: Any) -> list[str]:
    found = []
    for key, value in _STRIPPED.items():
        if part.__dict__.get(key):
            setattr(part, key, value) if key == "use_pretrained_backbone" else delattr(part, key)
            found.append(key)
    for key, allowed in (("_attn_implementation", _ATTENTION), ("_experts_implementation", _EXPERTS)):
        asked = getattr(part, key, None)
        if not isinstance(asked, str | None) or asked not in allowed:
            part.__dict__[f"{key}_internal"] = None
            found.append(f"{key.strip('_')} {asked!r}")
    return found


def _parts(config: Any, depth: int = 0) -> Iterator[Any]:
    """``config`` and every configuration inside of it."""
    yield config
    for value in list(vars(config).values()):
        if depth < 8 and hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _parts(value, depth + 1)


def _method(part: Any) -> str:
    described = part.quantization_config
    method = described.get("quant_method") if isinstance(described, dict) else getattr(described, "quant_method", None)
    return str(method or "by an unnamed method")[:60]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _is_at_home(path: Path, folder: Path) -> bool:
    """Whether a file lies in its folder; a folder of HuggingFace's cache (snapshots/REVISION) links to the blobs beside it."""
    target, home = path.resolve(), folder.resolve()
    if target.is_relative_to(home):
        return True
    return home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
