"""The splits of the equality matrix: name -> (ranks, overrides)."""


def split(world_size: int, **sizes: int) -> tuple[int, list[str]]:
    """A split of its own, beside the options of conf/parallel."""
    overrides = [f"parallel.world_size={world_size}"]
    return world_size, overrides + [f"parallel.{name}={size}" for name, size in sizes.items()]


SPLITS: dict[str, tuple[int, list[str]]] = {
    "tp2": (2, ["parallel=tp2"]),
    "tp4": (4, ["parallel=tp4"]),
    "dp2": (2, ["parallel=dp2"]),
    "ep2": (2, ["parallel=ep2"]),
    "ep4": (4, ["parallel=ep4"]),
    "cp2": (2, ["parallel=cp2"]),
    "cp4": (4, ["parallel=cp4"]),
    "dp2tp2": (4, ["parallel=dp2tp2"]),
    "tp3": split(
        3,
        attn_tp_size=3,
        embed_tp_size=3,
        lmhead_tp_size=3,
        dense_tp_size=3,
        shared_tp_size=3,
        o_proj_tp_size=3,
        moe_tp_size=3,
    ),
    # Every kind of layer has a size of its own: wider and narrower than the attention's.
    "wide": split(
        4,
        attn_tp_size=2,
        embed_tp_size=4,
        lmhead_tp_size=4,
        dense_tp_size=4,
        shared_tp_size=4,
        o_proj_tp_size=4,
        moe_tp_size=4,
    ),
    "narrow": split(
        4,
        attn_tp_size=4,
        embed_tp_size=2,
        lmhead_tp_size=1,
        dense_tp_size=2,
        shared_tp_size=1,
        o_proj_tp_size=2,
        moe_tp_size=2,
    ),
    "crossed": split(
        4,
        attn_tp_size=1,
        embed_tp_size=2,
        lmhead_tp_size=4,
        dense_tp_size=2,
        shared_tp_size=4,
        o_proj_tp_size=2,
        moe_tp_size=2,
    ),
}
