"""transformers' text generation pipeline over a compiled model."""

from collections.abc import Mapping
from typing import Any

from transformers import TextGenerationPipeline, pipeline


class CompiledTextGeneration(TextGenerationPipeline):
    """Without the look at the model's class: a compiled model is none of transformers' classes, and generates as they do."""

    def check_model_type(self, supported_models: Any) -> None:
        """Nothing."""


def text_pipeline(model: Any, tokenizer: Any, options: Mapping[str, Any]) -> Any:
    """transformers' ``pipeline("text-generation", ...)``."""
    return pipeline("text-generation", model=model, tokenizer=tokenizer, pipeline_class=CompiledTextGeneration, **options)
