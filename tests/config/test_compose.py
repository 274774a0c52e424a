import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

import inferkit
from inferkit.config.compose import compose, load_config, to_inference_config
from inferkit.config.schema import DType, InferenceConfig
from inferkit.core.errors import ConfigError


def test_load_config_is_typed_and_resolved(make_model: Callable[..., Path]) -> None:
    cfg = load_config(["model=llama", f"model.path={make_model()}", "model.dtype=float32"])

    assert isinstance(cfg, InferenceConfig)
    assert cfg.model.dtype is DType.float32
    assert cfg.scheduler.batch_size == 32
    assert cfg.platform._target_ == "inferkit.platforms.cpu.CpuPlatform"


def test_load_config_names_every_fault() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["scheduler.bath_size=3", "data.top_p=3"])

    assert str(caught.value) == (
        "2 faults in the configuration\n"
        "\n"
        "  scheduler.bath_size=3\n"
        "      there is no such key; did you mean scheduler.batch_size?\n"
        "\n"
        "  data.top_p=3.0\n"
        "      is out of range; allowed is in [0.0, 1.0]"
    )


def test_load_config_with_a_folder_of_options(tmp_path: Path) -> None:
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "small.yaml").write_text(
        "defaults: [default, _self_]\nbatch_size: 2\n"
    )

    assert load_config(["scheduler=small"], config_dir=tmp_path).scheduler.batch_size == 2


def test_load_config_logs_warnings(caplog: pytest.LogCaptureFixture) -> None:
    load_config(["data.top_p=0.5"])

    assert "data.top_p=0.5: has no effect with data.temperature=0 (greedy)" in caplog.text


def test_compose_gives_the_job_part_as_it_is() -> None:
    cfg = compose(["data.limit=${data.seed}"])

    assert isinstance(cfg, DictConfig)
    assert "hydra" not in cfg
    assert OmegaConf.is_interpolation(cfg.data, "limit")
    with pytest.raises(ConfigError, match="parallel/tp15"):
        compose(["parallel=tp15"])


def test_to_inference_config_checks_again() -> None:
    cfg = compose(["data.limit=0", "kv_cache.block_size=0"])

    with pytest.raises(ConfigError, match="2 faults"):
        to_inference_config(cfg)
    assert cfg.data.limit == 0


def test_relative_paths_are_those_of_the_caller(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model()
    monkeypatch.chdir(folder.parent)

    assert load_config(["model=llama", f"model.path={folder.name}"]).model.path == folder.name


def test_names_of_the_package_are_lazy() -> None:
    assert inferkit.load_config is load_config
    assert inferkit.ConfigError is ConfigError
    assert "OfflineInference" in dir(inferkit)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        inferkit.Nothing  # noqa: B018


def test_load_config_works_inside_a_program_that_uses_hydra_itself(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("x: 1\n")
    code = f"""
from hydra import compose, initialize_config_dir
from inferkit import load_config
with initialize_config_dir({str(tmp_path)!r}, version_base="1.3"):
    before = compose("other")
    assert load_config(["data.limit=3"]).data.limit == 3
    assert compose("other") == before
import sys
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
