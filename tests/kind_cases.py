"""A context in which kinds of matches are looked up."""

from agentcompile_cuda_kit.targets import PRESETS

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.store import Store


def context(*extra, strict=True, only=("transformers_rules",)):
    catalog = load_catalog(only=only, strict=strict, extra=extra)
    return Context(catalog=catalog, target=PRESETS["h200"], config=Config(), store=Store(None))
