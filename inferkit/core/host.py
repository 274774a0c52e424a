"""What this machine has, asked without any library."""

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def available_memory() -> int | None:
    """Bytes that the machine has free, or the cgroup leaves if that is less; None = unknown."""
    try:
        lines = MEMINFO.read_text("utf-8").splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in sizes:
        return None
    available = int(sizes["MemAvailable"].split()[0]) * 1024
    try:
        limit = (CGROUP / "memory.max").read_text("utf-8").strip()
        used = int((CGROUP / "memory.current").read_text("utf-8"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return available
    if limit == "max":
        return available
    # File pages that nobody uses are given back when memory is asked for.
    return max(0, min(available, int(limit) - used + int(stat.get("inactive_file", 0))))
