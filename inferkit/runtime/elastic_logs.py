"""Where torch.distributed.elastic puts what the workers of a run print."""

from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs


class RankFiles(LogsSpecs):
    """`rank<r>.stdout.log` and `rank<r>.stderr.log`, side by side in one folder."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__(log_dir=str(log_dir))
        self.log_dir = log_dir

    @property
    def root_log_dir(self) -> str:
        return str(self.log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        def paths(name: str) -> dict[int, str]:
            return {rank: str(self.log_dir / f"rank{rank}.{name}") for rank in envs}

        error_files = paths("error.json")
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = error_files[rank]
        return LogsDest(
            stdouts=paths("stdout.log"),
            stderrs=paths("stderr.log"),
            error_files=error_files,
        )
