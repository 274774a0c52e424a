"""Which instances may hand KV over to each other."""

import json
from typing import Any

import msgspec
import pytest

from inferkit.core.cache_spec import CacheKind, CacheSpec
from inferkit.core.parallel_layout import ParallelLayout
from inferkit.core.transfer_messages import InstanceLayout, LayerLayout
from inferkit.kv_transfer.layout import (
    LayoutError,
    check_compatible,
    differences,
    instance_layout,
    layer_layouts,
    layout_from_dict,
)


def spec(layer_idx: int, **changed: Any) -> CacheSpec:
    values: dict[str, Any] = {
        "layer_idx": layer_idx,
        "kind": CacheKind.FULL,
        "manager_key": "full_attention",
        "num_heads": 3,
        "dims": (64, 64),
        "dtype": "bfloat16",
        "block_size": 128,
    }
    return CacheSpec(**(values | changed))


def layout(parallel: ParallelLayout | None = None, **changed: Any) -> InstanceLayout:
    parallel = parallel or ParallelLayout()
    heads = {1: 3, 2: 2, 4: 1}[parallel.attn_tp_size]
    specs = [spec(idx, num_heads=heads) for idx in range(4)]
    values: dict[str, Any] = {
        "model": "m",
        "model_fingerprint": "f",
        "transfer_engine": "tcp/1",
        "parallel": parallel,
        "layers": layer_layouts(specs, [3] * 4, tp_size=parallel.attn_tp_size),
    }
    return instance_layout(**(values | changed))


def changed_layers(base: InstanceLayout, indices: list[int], **changed: Any) -> InstanceLayout:
    layers = tuple(
        msgspec.structs.replace(layer, **changed) if layer.layer_idx in indices else layer
        for layer in base.layers
    )
    return msgspec.structs.replace(base, layers=layers)


def check(prefill: InstanceLayout, decode: InstanceLayout) -> list[str]:
    return check_compatible(prefill, decode, prefill_id="p0", decode_id="d0")


def test_sizes_of_the_ranks_may_differ() -> None:
    prefill = layout(ParallelLayout(world_size=4, attn_tp_size=4))
    decode = layout(ParallelLayout(world_size=4, attn_tp_size=2))
    assert (prefill.attn_dp_size, decode.attn_dp_size) == (1, 2)
    assert check(prefill, decode) == []
    assert check(layout(ParallelLayout(world_size=2, cp_size=2)), decode) == []


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("dtype", "float32", "'bfloat16', decode has 'float32'"),
        ("block_size", 64, "128, decode has 64"),
        ("num_kv_heads", 4, "3, decode has 4"),
        ("dims", (64, 32), r"\(64, 64\), decode has \(64, 32\)"),
        ("kind", "sliding_window", "'full_attention', decode has 'sliding_window'"),
        ("window", 512, "None, decode has 512"),
        ("layout", "BnNBsD", "'BnBsND', decode has 'BnNBsD'"),
        ("manager_key", "x", "'full_attention', decode has 'x'"),
    ],
)
def test_a_layer_that_differs_is_refused_with_both_values(
    field: str, value: Any, shown: str
) -> None:
    decode = changed_layers(layout(), [0, 1, 3], **{field: value})
    with pytest.raises(
        LayoutError, match=rf"p0 and decode d0.*{field} of layer 0-1, 3: prefill has {shown}"
    ):
        check(layout(), decode)


def test_every_field_of_a_layer_is_compared() -> None:
    assert set(LayerLayout.__struct_fields__) == {
        "layer_idx",
        *("kind", "manager_key", "num_kv_heads", "dims"),
        *("dtype", "block_size", "layout", "window"),
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("model_fingerprint", "0"),
        ("transfer_engine", "tcp/2"),
        ("verify_digest", True),
    ],
)
def test_an_instance_that_differs_is_refused_with_both_values(field: str, value: Any) -> None:
    decode = layout(**{field: value})
    with pytest.raises(LayoutError, match=rf"{field}: prefill has .*, decode has {value!r}"):
        check(layout(), decode)


def test_all_differences_are_named_at_once() -> None:
    decode = changed_layers(layout(model="n"), [0, 1, 2, 3], dtype="float32", block_size=1)
    assert [difference.field for difference in differences(layout(), decode)] == [
        "model",
        "dtype of layer 0-3",
        "block_size of layer 0-3",
    ]


def test_missing_layers_are_named() -> None:
    decode = msgspec.structs.replace(layout(), layers=layout().layers[:2])
    with pytest.raises(LayoutError, match="layer indices: prefill has '0-3', decode has '0-1'"):
        check(layout(), decode)


def test_decode_cannot_be_context_parallel() -> None:
    decode = layout(ParallelLayout(world_size=2, cp_size=2))
    with pytest.raises(LayoutError, match=r"cp_size \(decode must have 1\).*decode has 2"):
        check(layout(), decode)


def test_decode_alone_may_have_mtp_layers() -> None:
    mtp = layer_layouts([spec(4)], [3], tp_size=1)
    (warning,) = check(layout(), layout(mtp_layers=mtp))
    assert "prefill p0 has no MTP layers, decode d0 has 1" in warning
    assert check(layout(mtp_layers=mtp), layout()) == []
    other = layer_layouts([spec(4, dtype="float32")], [3], tp_size=1)
    with pytest.raises(LayoutError, match="dtype of MTP layer 4"):
        check(layout(mtp_layers=mtp), layout(mtp_layers=other))


def test_a_spec_that_is_no_share_of_its_heads_is_refused() -> None:
    with pytest.raises(LayoutError, match="layer 0 caches 3 heads per rank.*give 2"):
        layer_layouts([spec(0)], [3], tp_size=2)


def test_a_layout_travels_as_json() -> None:
    data = json.loads(msgspec.json.encode(layout()))
    assert layout_from_dict(data) == layout()
    with pytest.raises(LayoutError, match="attn_tp_size"):
        layout_from_dict(data | {"attn_tp_size": 0})
    with pytest.raises(LayoutError, match="surprise"):
        layout_from_dict(data | {"surprise": 0})
