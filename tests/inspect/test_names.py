import pytest

from inferkit.config.space import ConfigSpace
from inferkit.inspect.names import derived_names


@pytest.mark.parametrize("words", [[], ["parallel=tp2"]])
def test_names_follow_from_the_words_so_far(words: list[str]) -> None:
    names = derived_names(["model=qwen3_8b", *words], ConfigSpace())

    assert {"rank.heads", "kv_cache.block_bytes", "parallel.attn_dp_size"} <= set(names)
    assert any(name.startswith("groups.") for name in names) == bool(words)


def test_words_that_do_not_compose_are_no_error() -> None:
    assert derived_names(["parallel=nope", "no.such=1", "model={"], ConfigSpace()) == []
