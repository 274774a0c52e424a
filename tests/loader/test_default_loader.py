"""Weights arrive in the right place, in the right type, and none is missed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from inferkit.core.errors import ModelLoadError
from inferkit.core.parallel_layout import TP_SIZES, ParallelLayout
from inferkit.loader.default_loader import DefaultModelLoader
from inferkit.loader.source import resolve_source
from inferkit.parallel.comm_manager import CommManager
from tests.loader.files import hf_tensors, make_model, unpacked

Make = Callable[..., Path]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    source = resolve_source(str(folder))
    model = make_model(source.config, dtype)
    DefaultModelLoader().load(model, source)
    return model


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    def copy(folder: Path) -> Path:
        shutil.copytree(folder, tmp_path / "copy")
        return tmp_path / "copy"

    return copy


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_arrives_where_it_belongs(family: str, tiny_hf_model: Make) -> None:
    folder = tiny_hf_model(family)
    loaded, expected = unpacked(load(folder)), hf_tensors(folder)
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def test_biases_and_norms_of_all_kinds_arrive(tiny_hf_model: Make) -> None:
    folder = tiny_hf_model("llama", attention_bias=True, mlp_bias=True)
    loaded, expected = unpacked(load(folder)), hf_tensors(folder)
    assert sum(name.endswith(".bias") for name in expected) == 14
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def test_shards_give_the_same_model(tiny_hf_model: Make, tmp_path: Path) -> None:
    folder = tiny_hf_model("qwen3")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    whole, joined = load(folder).state_dict(), load(tmp_path).state_dict()
    assert all(torch.equal(whole[name], joined[name]) for name in whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_cast_to_the_type_of_the_model(dtype: torch.dtype, tiny_hf_model: Make) -> None:
    folder = tiny_hf_model("llama")
    for name, tensor in unpacked(load(folder, dtype)).items():
        assert torch.equal(tensor, hf_tensors(folder)[name].to(dtype)), name


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_tied_head_is_the_embedding(
    has_copy: bool, tiny_hf_model: Make, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_hf_model("qwen2", tie_word_embeddings=True))
    tensors = load_file(folder / "model.safetensors")
    if has_copy:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        save_file(tensors, folder / "model.safetensors")
    model = load(folder)
    head = model.get_submodule("lm_head").weight
    assert torch.equal(head, tensors["model.embed_tokens.weight"])
    assert head.data_ptr() == model.get_parameter("model.embed_tokens.weight").data_ptr()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_rank_reads_its_share_of_the_bytes(
    tp_size: int, tied: bool, tiny_hf_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is sent while a model loads, so its groups need no other processes.
    monkeypatch.setattr("torch.distributed.new_group", lambda *args, **kwargs: None)
    folder = tiny_hf_model("llama", tie_word_embeddings=tied)
    tensors = hf_tensors(folder)
    config = json.loads((folder / "config.json").read_text())
    sizes = {f"{kind}_tp_size": tp_size for kind in TP_SIZES}
    layout = ParallelLayout(world_size=tp_size, **sizes)
    read = []
    for rank in range(tp_size):
        source = resolve_source(str(folder))
        model = make_model(source.config, comm=CommManager(layout, rank=rank, local_world_size=1))
        DefaultModelLoader().load(model, source)
        read.append(source.checkpoint.num_bytes_read)
        assert not any(parameter.isnan().any() for parameter in model.parameters())
    whole = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" in name)
    kv = sum(t.nbytes for name, t in tensors.items() if ".k_proj." in name or ".v_proj." in name)
    split = sum(tensor.nbytes for tensor in tensors.values()) - whole - kv
    row_bytes = 4 * config["hidden_size"]
    num_vocab_tensors = 1 if tied else 2
    split -= num_vocab_tensors * config["vocab_size"] * row_bytes
    share = -(-config["vocab_size"] // tp_size)
    for rank, num_bytes in enumerate(read):
        rows = min(share, config["vocab_size"] - rank * share)
        vocab_bytes = num_vocab_tensors * rows * row_bytes
        kv_bytes = kv // min(tp_size, config["num_key_value_heads"])
        assert num_bytes == whole + split // tp_size + kv_bytes + vocab_bytes, rank


def test_progress_counts_bytes_to_the_end(tiny_hf_model: Make) -> None:
    source = resolve_source(str(tiny_hf_model("llama")))
    calls: list[tuple[int, int]] = []
    DefaultModelLoader().load(
        make_model(source.config), source, progress=lambda done, total: calls.append((done, total))
    )
    total = sum(tensor.nbytes for tensor in hf_tensors(source.directory).values())
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_surplus_and_mis_shaped_tensors_are_named_together(
    tiny_hf_model: Make, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_hf_model("llama"))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(16)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(128, 32)

    change_tensors(folder, change)
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    message = str(caught.value)
    assert "does not fit LlamaForCausalLM" in message
    assert "1 missing: model.norm.weight" in message
    assert "1 not known to the model: model.layers.0.self_attn.q_norm.weight" in message
    assert "model.layers.1.mlp.up_proj.weight (128, 32), expected (128, 64)" in message


def test_many_missing_tensors_are_counted(
    tiny_hf_model: Make, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_hf_model("llama"))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]

    change_tensors(folder, change)
    with pytest.raises(ModelLoadError, match=r"9 missing: (\S+, ){5}\.\.\. \(9 in all\)"):
        load(folder)


def test_nothing_is_copied_when_the_checkpoint_does_not_fit(
    tiny_hf_model: Make, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_hf_model("llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    source = resolve_source(str(folder))
    model = make_model(source.config)
    with pytest.raises(ModelLoadError, match="missing"):
        DefaultModelLoader().load(model, source)
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_no_source_has_no_weights(tiny_hf_model: Make) -> None:
    model = make_model(resolve_source(str(tiny_hf_model("llama"))).config)
    with pytest.raises(ModelLoadError, match=r"model\.path=null.*model\.with_ckpt=false"):
        DefaultModelLoader().load(model, None)
