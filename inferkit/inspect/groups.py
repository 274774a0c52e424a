"""The groups of a layout as text: short for any number of ranks."""

from inferkit.core.parallel_layout import TP_SIZES, ParallelLayout, Partition, Ranks

MAX_GROUPS_SHOWN = 8
ALONE = "every rank alone"


def partition_text(groups: Partition) -> str:
    """`{0-3} {4-7}`, `16 groups of 8: {0-7} {8-15} ... {120-127}`; ranks alone are left out."""
    shown = [ranks_text(ranks) for ranks in groups if len(ranks) > 1]
    if not shown:
        return ALONE
    if len(shown) <= MAX_GROUPS_SHOWN:
        return " ".join(shown)
    size = max(len(ranks) for ranks in groups)
    return f"{len(shown)} groups of {size}: {shown[0]} {shown[1]} ... {shown[-1]}"


def ranks_text(ranks: Ranks) -> str:
    """`{0-3}`, `{0,4}`, `{0-12 step 4}`."""
    steps = {right - left for left, right in zip(ranks, ranks[1:], strict=False)}
    step = steps.pop() if len(steps) == 1 else 0
    if step == 1:
        return f"{{{ranks[0]}-{ranks[-1]}}}"
    if step and len(ranks) > 2:
        return f"{{{ranks[0]}-{ranks[-1]} step {step}}}"
    return "{" + ",".join(map(str, ranks)) + "}"


def group_formula(layout: ParallelLayout, name: str) -> str:
    """How the groups of this name come about, with the numbers."""
    kind = name.removesuffix("_tp_group")
    if kind in TP_SIZES:
        return f"runs of {kind}_tp_size = {layout.tp_size(kind)}"
    if name.startswith("moe_ep_group"):
        text = f"moe_ep_size = {layout.moe_ep_size}, moe_tp_size = {layout.moe_tp_size} apart"
        return text + (", with a communicator of its own" if name.endswith("mc2") else "")
    if name == "dp_group":
        return f"attn_dp_size = {layout.attn_dp_size}, attn_tp_size = {layout.attn_tp_size} apart"
    if name == "cp_group":
        return f"runs of cp_size = {layout.cp_size}"
    size = f"attn_tp_size * cp_size = {layout.attn_tp_size * layout.cp_size}"
    if name == "tp_cpu_group":
        return f"runs of {size}, for scheduling"
    return f"the first of each {size}, for scheduling"
