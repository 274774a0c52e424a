"""Where torch.distributed.elastic puts what the ranks of a run print."""

from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs


class RankFiles(LogsSpecs):
    """`rank<r>.stdout.log` and `rank<r>.stderr.log`, side by side in one folder.

    Args:
        ranks: of this node, in the order of their local ranks.
    """

    def __init__(self, log_dir: Path, ranks: Sequence[int]) -> None:
        super().__init__(log_dir=str(log_dir))
        self.log_dir = log_dir
        self.ranks = ranks

    @property
    def root_log_dir(self) -> str:
        return str(self.log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        def paths(name: str) -> dict[int, str]:
            return {local: str(self.log_dir / f"rank{self.ranks[local]}.{name}") for local in envs}

        error_files = paths("error.json")
        for local_rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = error_files[local_rank]
        return LogsDest(
            stdouts=paths("stdout.log"),
            stderrs=paths("stderr.log"),
            error_files=error_files,
        )
