"""Numbers of the published models in conf/model, and what two splits of the largest come to."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from inferkit.config import memory
from inferkit.config.check import Checker
from inferkit.config.faults import Command
from inferkit.config.preflight import preflight
from inferkit.config.space import ConfigSpace
from inferkit.core.parallel_layout import TP_SIZES, ParallelLayout
from inferkit.inspect.summary import summary

PUBLISHED: Mapping[str, float] = {
    "qwen3_8b": 8.19e9,  # safetensors of huggingface.co/Qwen/Qwen3-8B: 8,190,735,360
    "qwen3_30b_a3b": 30.5e9,  # its model card
    "qwen3_32b": 32.8e9,  # its model card
    "qwen3_235b_a22b": 235.1e9,  # safetensors of its repository: 235,093,634,560
    "gpt_oss_20b": 20.9e9,  # arXiv 2508.10925, table 1
    "gpt_oss_120b": 116.8e9,  # the same
    "deepseek_v3_671b": 671e9,  # README_WEIGHTS.md of its repository: without the MTP layer
    "deepseek_r1_671b": 671e9,
    "mixtral_8x7b": 46.7e9,  # mistral.ai/news/mixtral-of-experts
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that no size is too big for."""
    monkeypatch.setattr(memory, "available_memory", lambda: 2**60)


def keys_of(space: ConfigSpace, option: str) -> dict[str, Any]:
    keys = OmegaConf.to_container(space.compose([f"model={option}"]).model.arch)
    assert isinstance(keys, dict)
    return {str(key): value for key, value in keys.items()}


def arch_of(space: ConfigSpace, option: str) -> Any:
    checked = Checker(space, is_run=False).check_overrides([f"model={option}"])
    assert checked.faults == ()
    return checked.files.arch


def test_every_option_with_a_shape_is_here(space: ConfigSpace) -> None:
    assert set(space.options("model")) - set(space.model_targets) == set(PUBLISHED)


@pytest.mark.parametrize("option", PUBLISHED)
def test_weights_come_to_the_published_size(space: ConfigSpace, option: str) -> None:
    assert arch_of(space, option).num_parameters == pytest.approx(PUBLISHED[option], rel=0.01)


@pytest.mark.parametrize("option", PUBLISHED)
def test_weights_are_those_of_transformers(space: ConfigSpace, option: str) -> None:
    """Its model of the same keys, without memory for the weights."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    keys = keys_of(space, option)
    keys.pop("quantization_config", None)

    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)

    held = sum(parameter.numel() for parameter in model.parameters())
    # DeepSeek's correction of the expert scores is a weight of the file, but a buffer there.
    held += sum(t.numel() for name, t in model.named_buffers() if name.endswith("correction_bias"))
    assert arch_of(space, option).num_parameters == held


def make_files(folder: Path, keys: Mapping[str, Any]) -> str:
    """A folder with a config.json as it is published; returns its override."""
    bookkeeping = {"torch_dtype": "bfloat16", "use_cache": True, "auto_map": {"AutoConfig": "x.Y"}}
    (folder / "config.json").write_text(json.dumps({**keys, **bookkeeping}))
    return f"model.path={folder}"


@pytest.mark.parametrize("option", PUBLISHED)
def test_the_option_takes_the_files_of_its_model(
    space: ConfigSpace, option: str, tmp_path: Path
) -> None:
    path = make_files(tmp_path, keys_of(space, option))

    assert Checker(space).check_overrides([f"model={option}", path]).faults == ()


def test_a_model_that_is_not_here_yet_has_the_shape_of_its_option(space: ConfigSpace) -> None:
    """What does not fit is refused before it is fetched."""
    words = ["model=qwen3_8b", "model.path=Qwen/Qwen3-8B"]

    assert Checker(space).check_overrides(words).files.arch == arch_of(space, "qwen3_8b")
    (fault,) = Checker(space).check_overrides([*words, "platform.device_memory=8000000000"]).faults
    assert fault.key == "model"
    partly = ["model=qwen3", "model.path=org/any", "+model.arch={rope_theta:1}"]
    assert Checker(space).check_overrides(partly).faults == ()


def test_files_of_another_size_take_the_option_of_their_family(
    space: ConfigSpace, tmp_path: Path
) -> None:
    path = make_files(tmp_path, keys_of(space, "qwen3_8b") | {"rope_theta": 5000000})

    message = preflight(Command(overrides=("model=qwen3_8b", path)), space).message

    assert "model.arch.rope_theta=1000000" in message
    assert f"  python -m inferkit model=qwen3 {path}" in message


def rows(space: ConfigSpace, *overrides: str) -> dict[str, str]:
    """Name -> text of what `check` shows."""
    lines = summary(Checker(space, is_run=False).check_overrides(overrides)).splitlines()
    pairs = [line.strip().split("  ", 1) for line in lines]
    return {name: text.strip() for name, text in pairs}


def groups(shown: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in shown.items() if "_group" in name}


# Qwen3-235B-A22B by hand: 94 layers of hidden size 4096, 64 query and 4 KV heads of size 128,
# 128 experts of size 1536, 151,936 words, embedding and head apart, 2 bytes each.


def test_235b_at_tp16(space: ConfigSpace) -> None:
    shown = rows(space, "model=qwen3_235b_a22b", "parallel=tp16")

    assert shown["ranks"] == "16: attn_dp_size=1, embed_dp_size=1, moe_ep_size=1"
    names = [*(f"{kind}_tp_group" for kind in TP_SIZES), "tp_cpu_group"]
    assert groups(shown) == dict.fromkeys(names, "{0-15}")
    # 64 / 16, and 4 heads for 16 ranks
    assert shown["heads"] == "4 of 64 query heads, 1 of 4 KV heads, each on 4 ranks"
    assert shown["experts"] == "128 of 128 in a layer, 1/16 of each"
    assert shown["KV cache"] == f"{94 * 2 * 1 * 128 * 2:,} bytes per token per rank"
    attention = 4096 * (4 + 2 * 1) * 128 + 4 * 128 * 4096 + 2 * 128
    experts = 128 * 3 * 4096 * (1536 // 16) + 128 * 4096
    weights = 94 * (attention + experts + 2 * 4096) + 2 * 151_936 // 16 * 4096 + 4096
    layout = ParallelLayout(world_size=16, **{f"{kind}_tp_size": 16 for kind in TP_SIZES})
    assert arch_of(space, "qwen3_235b_a22b").num_parameters_of_rank(layout) == weights
    assert shown["weights"] == "28,256 MiB per rank (235,093,634,560 parameters in all)"
    assert round(weights * 2 / 2**20) == 28_256


def test_235b_at_dp8tp2(space: ConfigSpace) -> None:
    """Eight times as many requests, and 23 % more weights on a rank."""
    shown = rows(space, "model=qwen3_235b_a22b", "parallel=dp8tp2")

    pairs = "{0-1} {2-3} {4-5} {6-7} {8-9} {10-11} {12-13} {14-15}"
    split = [f"{kind}_tp_group" for kind in TP_SIZES if kind != "moe"]
    assert shown["ranks"] == "16: attn_dp_size=8, embed_dp_size=8, moe_ep_size=16"
    assert groups(shown) == dict.fromkeys([*split, "tp_cpu_group"], pairs) | {
        "moe_ep_group": "{0-15}",
        "moe_ep_group_mc2": "{0-15}",
        "dp_group": "{0-14 step 2} {1-15 step 2}",
        "dp_leader_group": "{0-14 step 2}",
    }
    assert shown["batch"] == "256 requests, batch_size_per_dp_rank=32"
    assert shown["heads"] == "32 of 64 query heads, 2 of 4 KV heads"
    assert shown["experts"] == "8 of 128 in a layer"
    assert shown["KV cache"] == f"{94 * 2 * 2 * 128 * 2:,} bytes per token per rank"
    attention = 4096 * (32 + 2 * 2) * 128 + 32 * 128 * 4096 + 2 * 128
    experts = 8 * 3 * 4096 * 1536 + 128 * 4096
    weights = 94 * (attention + experts + 2 * 4096) + 2 * 151_936 // 2 * 4096 + 4096
    sizes = {f"{kind}_tp_size": 2 for kind in TP_SIZES if kind != "moe"}
    layout = ParallelLayout(world_size=16, **sizes)
    assert arch_of(space, "qwen3_235b_a22b").num_parameters_of_rank(layout) == weights
    assert shown["weights"] == "34,747 MiB per rank (235,093,634,560 parameters in all)"
    assert round(weights * 2 / 2**20) == 34_747


def test_671b_at_ep32_has_the_whole_latent_on_every_rank(space: ConfigSpace) -> None:
    shown = rows(space, "model=deepseek_r1_671b", "parallel=ep32")

    assert shown["heads"] == "4 of 128 query heads; the latent of keys and values is on all"
    assert shown["KV cache"] == f"{61 * (512 + 64) * 2:,} bytes per token per rank"
    assert shown["experts"] == "8 of 256 in a layer"
