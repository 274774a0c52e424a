"""The splits of the equality matrix: name -> (ranks, overrides)."""

from inferkit.core.parallel_layout import TP_SIZES


def split(world_size: int, everywhere: int, **sizes: int) -> tuple[int, list[str]]:
    """A split of its own, beside the options of conf/parallel.

    Args:
        everywhere: TP size of each kind of layer that `sizes` does not name.
    """
    of_kind = dict.fromkeys(TP_SIZES, everywhere) | sizes
    overrides = [f"parallel.{kind}_tp_size={size}" for kind, size in of_kind.items()]
    return world_size, [f"parallel.world_size={world_size}", *overrides]


SPLITS: dict[str, tuple[int, list[str]]] = {
    "tp2": (2, ["parallel=tp2"]),
    "tp4": (4, ["parallel=tp4"]),
    "dp2": (2, ["parallel=dp2"]),
    "ep2": (2, ["parallel=ep2"]),
    "ep4": (4, ["parallel=ep4"]),
    "cp2": (2, ["parallel=cp2"]),
    "cp4": (4, ["parallel=cp4"]),
    "dp2tp2": (4, ["parallel=dp2tp2"]),
    "tp3": split(3, 3),
    # Every kind of layer has a size of its own: wider and narrower than the attention's.
    "wide": split(4, 4, attn=2),
    "narrow": split(4, 2, attn=4, lmhead=1, shared=1),
    "crossed": split(4, 2, attn=1, lmhead=4, shared=4),
}
LOCK_STEP = frozenset({"wide", "crossed", "cp2", "cp4"})
"""Splits in which a layer computes tokens of several DP ranks, which then wait for each other."""
LOCK_STEP_OF_EXPERTS = LOCK_STEP | {"dp2", "dp2tp2"}
"""The same with experts, to which the tokens of all DP ranks travel."""
