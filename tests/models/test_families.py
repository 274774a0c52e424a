"""What `arch.py` of each registered family (tests/families.py) says is what its model does."""

import importlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inferkit import load_config
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError
from inferkit.kv_transfer.layout import layer_layouts
from inferkit.kv_transfer.rank_memory import model_heads
from tests.families import FAMILIES, VARIANTS
from tests.models.unjoined import context_of, layout_of
from tests.parallel.splits import SPLITS


@cache
def modules_of(option: str) -> tuple[Any, Any]:
    """(model class, module `arch`) that conf/model/<option>.yaml leads to."""
    config = load_config([f"model={option}", "model.path=some/model"])
    assert config.model.name == option
    module_name, _, class_name = config.model._target_.rpartition(".")
    package = module_name.rpartition(".")[0]
    model_class = getattr(importlib.import_module(module_name), class_name)
    return model_class, importlib.import_module(f"{package}.arch")


@pytest.fixture(params=VARIANTS)
def variant(request, tiny_hf_model):
    """(option, file, its keys) of each tiny model."""
    option, config = VARIANTS[request.param]
    file = tiny_hf_model(option, **config) / "config.json"
    return option, file, json.loads(file.read_text("utf-8"))


def test_every_model_class_that_an_option_names_is_registered():
    named = {target.rpartition(".")[2] for target in ConfigSpace().model_targets.values()}
    assert named == {family.architecture for family in FAMILIES.values()}


def test_the_option_leads_to_the_class_of_the_architecture():
    for option, family in FAMILIES.items():
        model_class, _ = modules_of(option)
        assert model_class.__name__ == family.architecture


def test_arch_counts_the_weights_that_transformers_saves(variant):
    option, file, keys = variant
    arch = modules_of(option)[1].parse_arch(keys, origin=str(file))
    assert arch.architecture == FAMILIES[option].architecture
    weights = load_file(file.with_name("model.safetensors"))
    assert arch.num_parameters == sum(tensor.numel() for tensor in weights.values())
    assert arch.max_context_len >= 1
    assert arch.kv_bytes_per_token("float32") == 2 * arch.kv_bytes_per_token("bfloat16")


def test_arch_is_frozen_and_compares_by_value(variant):
    option, file, keys = variant
    parse_arch = modules_of(option)[1].parse_arch
    arch = parse_arch(keys, origin=str(file))
    assert arch == parse_arch(keys, origin="elsewhere")
    with pytest.raises(AttributeError):
        arch.vocab_size = 1


def test_model_arch_may_hold_every_key_of_a_config_json(variant):
    option, file, keys = variant
    module = modules_of(option)[1]
    assert module.parse_arch(keys) == module.parse_arch(keys, origin=str(file))
    del keys["architectures"], keys["model_type"]
    named = module.parse_arch(keys, architecture=FAMILIES[option].architecture)
    assert named.architecture == FAMILIES[option].architecture


def test_a_misspelt_key_of_model_arch_is_refused_with_a_suggestion(variant):
    option, _, keys = variant
    with pytest.raises(ConfigError, match=r"model\.arch\.hidden_sise .*did you mean hidden_size"):
        modules_of(option)[1].parse_arch(keys | {"hidden_sise": 64})


def test_a_file_may_hold_keys_that_nobody_knows(variant):
    option, file, keys = variant
    parse_arch = modules_of(option)[1].parse_arch
    known = parse_arch(keys, origin=str(file))
    assert parse_arch(keys | {"hidden_sise": 64}, origin=str(file)) == known


def test_all_faults_of_a_file_are_named_at_once(variant):
    option, file, keys = variant
    with pytest.raises(ConfigError) as caught:
        modules_of(option)[1].parse_arch(
            keys | {"vocab_size": -1, "rms_norm_eps": "small"}, origin=str(file)
        )
    for key in ("vocab_size", "rms_norm_eps"):
        assert re.search(f"^{key} in {re.escape(str(file))}=", str(caught.value), re.MULTILINE)


def test_another_architecture_is_refused(variant):
    option, file, keys = variant
    with pytest.raises(ConfigError, match="GPT2LMHeadModel.*allowed"):
        modules_of(option)[1].parse_arch(
            keys | {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, origin=str(file)
        )


def test_user_keys_beside_a_file_may_only_repeat_it(variant):
    option, file, keys = variant
    check = modules_of(option)[1].check_user_arch
    check(keys, keys, origin=str(file))
    with pytest.raises(ConfigError) as caught:
        check({"hidden_size": 8 * keys["hidden_size"], "hidden_sise": 64}, keys, origin=str(file))
    assert "model.arch.hidden_sise is not a known key" in str(caught.value)
    assert f"{file} has {keys['hidden_size']}; the file decides" in str(caught.value)


@pytest.mark.parametrize("split", ["alone", *SPLITS])
def test_arch_knows_what_the_fullest_rank_holds(variant, split):
    option, file, keys = variant
    model_class, module = modules_of(option)
    arch = module.parse_arch(keys, origin=str(file))
    layout = layout_of(split)
    num_experts = getattr(arch, "num_experts", None) or layout.moe_ep_size
    if num_experts % layout.moe_ep_size:
        pytest.skip("experts are not padded")
    weights, kv_bytes, layers = set(), set(), set()
    for rank in range(layout.world_size):
        model = model_class(arch, ctx=context_of(layout, rank, torch.bfloat16))
        weights.add(sum(parameter.numel() for parameter in model.parameters()))
        specs = model.cache_specs()
        kv_bytes.add(sum(spec.bytes_per_token for spec in specs))
        layers.add(layer_layouts(specs, model_heads(specs), tp_size=layout.attn_tp_size))
    assert len(layers) == 1  # what instances compare before they hand a cache over
    assert arch.num_parameters_of_rank(layout) == max(weights)
    assert arch.kv_bytes_per_token_of_rank("bfloat16", layout) == max(kv_bytes)
    if split == "alone":
        assert arch.num_parameters == max(weights)
        assert arch.kv_bytes_per_token("bfloat16") == max(kv_bytes)


def test_arch_is_read_without_torch():
    names = [modules_of(option)[1].__name__ for option in FAMILIES]
    code = (
        f"import sys, importlib; [importlib.import_module(name) for name in {names}]; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
