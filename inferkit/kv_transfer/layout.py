"""What two instances must have in common to hand KV over, checked before the first byte.

TP, DP and (on the prefill side) CP sizes may differ; everything that decides what a block holds
may not. A refusal names both values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from inferkit.core.cache_spec import CacheSpec
from inferkit.core.errors import ConfigError
from inferkit.core.parallel_layout import HeadLayout, ParallelLayout
from inferkit.core.transfer_messages import InstanceLayout, LayerLayout

SCALARS = ("model", "model_fingerprint", "transfer_engine", "verify_digest")
LAYER_FIELDS = tuple(name for name in LayerLayout.__struct_fields__ if name != "layer_idx")


class LayoutError(ConfigError):
    """Two instances cannot hand KV over to each other."""


def layer_layouts(
    specs: Sequence[CacheSpec], num_kv_heads: Sequence[int], *, tp_size: int
) -> tuple[LayerLayout, ...]:
    """Layers over all ranks, from one rank's specs.

    Args:
        num_kv_heads: of each layer's model, without padding; 1 for latent attention.

    Raises:
        LayoutError: a spec is not the share that `tp_size` ranks have of so many heads.
    """
    layers = []
    for spec, total in zip(specs, num_kv_heads, strict=True):
        local = kv_head_layout(total, tp_size).num_local_kv_heads
        if spec.num_heads != local:
            raise LayoutError(
                f"layer {spec.layer_idx} caches {spec.num_heads} heads per rank, but {total} KV "
                f"heads on attn_tp_size={tp_size} ranks give {local}"
            )
        layers.append(
            LayerLayout(
                layer_idx=spec.layer_idx,
                kind=str(spec.kind),
                manager_key=spec.manager_key,
                num_kv_heads=total,
                dims=spec.dims,
                dtype=spec.dtype,
                block_size=spec.block_size,
                layout=spec.layout,
                window=spec.window,
            )
        )
    return tuple(layers)


def instance_layout(
    *,
    model: str,
    model_fingerprint: str,
    transfer_engine: str,
    parallel: ParallelLayout,
    layers: tuple[LayerLayout, ...],
    mtp_layers: tuple[LayerLayout, ...] = (),
    verify_digest: bool = False,
) -> InstanceLayout:
    return InstanceLayout(
        model=model,
        model_fingerprint=model_fingerprint,
        transfer_engine=transfer_engine,
        attn_tp_size=parallel.attn_tp_size,
        attn_dp_size=parallel.attn_dp_size,
        cp_size=parallel.cp_size,
        layers=layers,
        mtp_layers=mtp_layers,
        verify_digest=verify_digest,
    )


def kv_head_layout(num_kv_heads: int, tp_size: int) -> HeadLayout:
    """How KV heads lie on ranks; one head, as latents have, lies on every rank."""
    return HeadLayout(num_heads=num_kv_heads, num_kv_heads=num_kv_heads, tp_size=tp_size)


@dataclass(frozen=True, slots=True)
class Difference:
    field: str
    prefill: object
    decode: object

    def __str__(self) -> str:
        return f"{self.field}: prefill has {self.prefill!r}, decode has {self.decode!r}"


def differences(prefill: InstanceLayout, decode: InstanceLayout) -> list[Difference]:
    """Everything that keeps the two from working together; equal ones of many layers once."""
    found = [
        Difference(name, getattr(prefill, name), getattr(decode, name))
        for name in SCALARS
        if getattr(prefill, name) != getattr(decode, name)
    ]
    if decode.cp_size != 1:
        found.append(Difference("cp_size (decode must have 1)", prefill.cp_size, decode.cp_size))
    found += _layer_differences("layer", prefill.layers, decode.layers)
    if prefill.mtp_layers and decode.mtp_layers:
        found += _layer_differences("MTP layer", prefill.mtp_layers, decode.mtp_layers)
    return found


def check_compatible(
    prefill: InstanceLayout, decode: InstanceLayout, *, prefill_id: str, decode_id: str
) -> list[str]:
    """Warnings for a pair that can work together.

    Raises:
        LayoutError: it cannot; every difference is named with both values.
    """
    found = differences(prefill, decode)
    if found:
        raise LayoutError(
            f"prefill {prefill_id} and decode {decode_id} cannot hand KV over: "
            + "; ".join(map(str, found))
            + ". Start both from one configuration; config.resolved.yaml in their run directories "
            "has what each runs with"
        )
    if decode.mtp_layers and not prefill.mtp_layers:
        return [
            f"prefill {prefill_id} has no MTP layers, decode {decode_id} has "
            f"{len(decode.mtp_layers)}: their caches start empty, so the first drafts are worse"
        ]
    return []


def _layer_differences(
    name: str, prefill: Sequence[LayerLayout], decode: Sequence[LayerLayout]
) -> Iterator[Difference]:
    """Layers are matched by their index, never by their position in a list."""
    ours = {layer.layer_idx: layer for layer in prefill}
    theirs = {layer.layer_idx: layer for layer in decode}
    if ours.keys() != theirs.keys():
        yield Difference(f"{name} indices", _spans(ours), _spans(theirs))
        return
    for field in LAYER_FIELDS:
        pairs: dict[tuple[object, object], list[int]] = {}
        for idx, layer in ours.items():
            pair = (getattr(layer, field), getattr(theirs[idx], field))
            if pair[0] != pair[1]:
                pairs.setdefault(pair, []).append(idx)
        for (left, right), indices in pairs.items():
            yield Difference(f"{field} of {name} {_spans(indices)}", left, right)


def _spans(indices: Sequence[int] | dict[int, LayerLayout]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for idx in sorted(indices):
        if spans and spans[-1][1] == idx - 1:
            spans[-1][1] = idx
        else:
            spans.append([idx, idx])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def layout_from_dict(data: object) -> InstanceLayout:
    """The layout of a route that came as JSON.

    Raises:
        LayoutError: a field is missing, unknown or of the wrong kind.
    """
    try:
        return msgspec.convert(data, InstanceLayout)
    except msgspec.ValidationError as error:
        raise LayoutError(f"the layout of a prefill instance is malformed: {error}") from error
