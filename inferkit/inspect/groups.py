"""The groups of a layout as text: short for any number of ranks."""

from collections.abc import Mapping

from inferkit.core.parallel_layout import ParallelLayout, Partition, Ranks

MAX_GROUPS_SHOWN = 8


def group_texts(layout: ParallelLayout) -> Mapping[str, str]:
    """Group name -> its ranks: `{0-3} {4-7}`, `16 groups of 8: {0-7} {8-15} ... {120-127}`."""
    return {name: partition_text(groups) for name, groups in layout.partitions.items()}


def partition_text(groups: Partition) -> str:
    """Ranks that work alone are left out."""
    shown = [ranks_text(ranks) for ranks in groups if len(ranks) > 1]
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
