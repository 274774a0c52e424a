"""A git repository that holds this inferkit, at revisions with other options and other code."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMES = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "someone"), ("EMAIL", "someone@example.org"))
}


@dataclass(frozen=True)
class Repository:
    folder: Path

    def git(self, *arguments: str) -> str:
        variables = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | NAMES
        variables |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        command = ["git", "-C", str(self.folder), *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env=variables
        ).stdout.strip()

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self, tag: str) -> None:
        """Everything as it is, under the name `tag`."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--no-verify", "--allow-empty", "--message", tag)
        self.git("tag", tag)

    def worktrees(self) -> int:
        return len(self.git("worktree", "list", "--porcelain").split("\n\n"))


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Tags: empty, old (without the verb explain), first, second, slow (never composes),
    broken (its code is no Python)."""
    repository = Repository(tmp_path_factory.mktemp("repository"))
    folder = repository.folder
    repository.git("init", "--quiet")
    repository.write(".gitignore", "__pycache__/\n")
    repository.commit("empty")
    for name in ("inferkit", "conf", "models"):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skipped)
    own = "_target_: inferkit.scheduler.scheduler.Scheduler\nmax_new_tokens: 5\n"
    repository.write("own/scheduler/mine.yaml", own)
    verbs = (folder / "inferkit" / "inspect" / "verbs.py").read_text()
    repository.write(
        "inferkit/inspect/verbs.py", verbs.replace('"explain": Verb(', '"told": Verb(')
    )
    repository.commit("old")
    repository.write("inferkit/inspect/verbs.py", verbs)
    repository.commit("first")
    paged = (folder / "conf" / "kv_cache" / "paged.yaml").read_text()
    repository.write("conf/kv_cache/paged.yaml", f"{paged}block_size: 64\n")
    repository.write("own/scheduler/mine.yaml", own.replace("5", "6"))
    repository.write("conf/engine/other.yaml", "warm_up: false\n")
    repository.commit("second")
    main = (folder / "inferkit" / "__main__.py").read_text()
    repository.write("inferkit/__main__.py", "import time\n\ntime.sleep(600)\n")
    repository.commit("slow")
    repository.write("inferkit/__main__.py", main)
    rules = (folder / "inferkit" / "config" / "rules.py").read_text()
    repository.write("inferkit/config/rules.py", "x = (1\ny = = 2\n")
    repository.commit("broken")
    repository.write("inferkit/config/rules.py", rules)
    return repository
