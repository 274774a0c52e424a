"""What the parent of an instance reads of its model: tokenizer, vocabulary, longest context."""

from dataclasses import dataclass
from typing import Any

from inferkit.config.model_files import arch_of
from inferkit.config.resolve import resolve_automatic
from inferkit.config.schema import InferenceConfig
from inferkit.online.service import ServedModel


@dataclass(frozen=True, kw_only=True)
class ModelSide:
    """The parent's part of a model."""

    config: InferenceConfig
    """With `engine.max_model_len` as a number: the model's own context where it was 0."""
    served: ServedModel
    tokenizer: Any


def read_model(config: InferenceConfig) -> ModelSide:
    """Find the model, fetch its files where they are not here, and load its tokenizer.

    Raises:
        ModelLoadError, ConfigError: as the workers would, which then need not start.
    """
    from inferkit.loader.byte_tokenizer import make_byte_tokenizer
    from inferkit.loader.source import resolve_source

    model = config.model
    if model.path is None:
        arch = arch_of(model._target_, model.arch)
        tokenizer: Any = make_byte_tokenizer(arch.vocab_size)
    else:
        source = resolve_source(model.path, with_weights=model.with_ckpt)
        arch = arch_of(model._target_, source.config)
        tokenizer = source.load_tokenizer()
    config = resolve_automatic(config, context_len=int(arch.max_context_len))
    served = ServedModel(
        name=model.name,
        path=model.path,
        vocab_size=arch.vocab_size,
        max_model_len=config.engine.max_model_len,
        default_max_tokens=config.scheduler.max_new_tokens,
    )
    return ModelSide(config=config, served=served, tokenizer=tokenizer)
