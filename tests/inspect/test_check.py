import json
from pathlib import Path

from inferkit.config.check import Checker
from inferkit.config.space import ConfigSpace
from inferkit.inspect.check import UNKNOWN, summary


def test_summary_shows_derived_values(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 259,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    checker = Checker(ConfigSpace())

    text = summary(
        checker.check_overrides(["model=llama", f"model.path={tmp_path}", "scheduler.batch_size=8"])
    )

    parameters = 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128 + 2 * 64) + 2 * 259 * 64 + 64
    assert f"({parameters:,} parameters)" in text
    assert "256 bytes per token" in text
    assert "for 8 x 288 tokens" in text
    assert "batch_size_per_dp_rank=8" in text
    assert "2048 tokens, chunked prefill" in text


def test_summary_says_what_is_not_known_yet() -> None:
    assert summary(Checker(ConfigSpace()).check_overrides([])).count(UNKNOWN) == 2
