import difflib
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from inferkit.config import reference, schema
from inferkit.config.keys import leaf_keys
from inferkit.config.reference import BEGIN, COMMAND, END, README, field_texts, main, with_reference
from inferkit.config.schema import DecodeSchedulerConfig, InferenceConfig


def test_the_readme_has_the_keys_of_the_schema() -> None:
    now = README.read_text("utf-8")
    wanted = with_reference(now)
    diff = "\n".join(difflib.unified_diff(now.splitlines(), wanted.splitlines(), lineterm="", n=0))
    assert now == wanted, f"conf/README.md is not up to date; run {COMMAND}\n{diff}"


def test_every_key_has_a_row() -> None:
    cfg = OmegaConf.structured(InferenceConfig)
    cfg.scheduler = OmegaConf.structured(DecodeSchedulerConfig)
    rows = [
        line.split("|")[1].strip(" `")
        for line in reference.reference().splitlines()
        if "| `" in line
    ]

    assert set(leaf_keys(cfg)) <= set(rows)
    assert len(rows) == len(set(rows))
    nodes = set(rows) - set(leaf_keys(cfg))
    assert all(any(row.startswith(f"{node}.") for row in rows) for node in nodes)


def test_rows_tell_type_default_and_meaning() -> None:
    rows = reference.reference().splitlines()

    assert (
        "| `data.limit` | integer or null | `null` | Use only this many prompts (null = all). |"
        in rows
    )
    assert any(
        row.startswith("| `router.policy` | hash, least_loaded | `hash` | hash = ") for row in rows
    )
    assert any("+role=decode only: tokens kept free" in row for row in rows)


def test_a_text_is_that_of_the_nearest_class() -> None:
    assert field_texts(schema.LoaderConfig)["_target_"].startswith("The loader of")
    assert field_texts(schema.LoaderConfig)["params"].startswith("Keyword arguments")


def test_a_key_without_a_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Silent:
        a: int = 0

    with pytest.raises(ValueError, match="Silent.a has no docstring below it"):
        list(reference._keys(Silent, ""))


def test_update_changes_what_is_made_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "README.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")

    assert main(["--update"], file) == 0
    text = file.read_text()
    assert text.startswith(f"before\n{BEGIN}\n\n| key |")
    assert text.endswith(f"\n{END}\nafter\n")
    assert main(["--update"], file) == 0
    assert file.read_text() == text

    assert main([]) == 0
    assert capsys.readouterr().out.strip() in text
    assert main(["--updat"]) == 2
    with pytest.raises(ValueError, match="are missing"):
        with_reference("nothing")
