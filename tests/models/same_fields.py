"""Fields of an architecture that have one name with us and in transformers."""

from typing import Any

SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "bos_token_id",
)


def assert_same_fields(arch: Any, config: Any, *further: str) -> None:
    """Of `config`, what transformers reads from the same file; `further` are more names."""
    for name in (*SAME_NAME, *further):
        assert getattr(arch, name) == getattr(config, name), name
    ids = config.eos_token_id
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    assert arch.eos_token_ids == tuple(ids)
