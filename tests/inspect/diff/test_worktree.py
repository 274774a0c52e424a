import os
import signal
from pathlib import Path

import pytest

from inferkit.core.errors import ConfigError
from inferkit.inspect.diff import worktree
from inferkit.inspect.diff.worktree import Checkout, find_checkout
from tests.inspect.diff.conftest import Repository


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Two commits of a project whose code lies in a folder of the checkout."""
    repository = Repository(tmp_path / "it's one")
    repository.folder.mkdir()
    repository.git("init", "--quiet", "--initial-branch", "main")
    repository.write("code/inferkit/file", "1")
    repository.commit("one")
    repository.write("code/inferkit/file", "2")
    repository.commit("two")
    return Checkout(folder=repository.folder, prefix=Path("code"))


def content(checkout: Checkout, revision: str) -> str:
    with checkout.worktree(checkout.commit_of(revision)) as root:
        return (root / "inferkit" / "file").read_text()


@pytest.mark.parametrize(
    ("revision", "text"), [("one", "1"), ("main", "2"), ("HEAD", "2"), ("HEAD~1", "1")]
)
def test_a_worktree_holds_its_revision(checkout: Checkout, revision: str, text: str) -> None:
    (checkout.folder / "code" / "inferkit" / "file").write_text("not committed")

    assert content(checkout, revision) == text
    assert content(checkout, checkout.commit_of(revision)[:8]) == text


def test_a_worktree_is_gone_after_an_error(checkout: Checkout) -> None:
    with pytest.raises(OSError, match="own"), checkout.worktree(checkout.commit_of("one")) as root:
        raise OSError("own")

    assert not root.exists()
    assert Repository(checkout.folder).worktrees() == 1


def test_a_worktree_whose_folder_is_gone_is_forgotten(checkout: Checkout) -> None:
    with checkout.worktree(checkout.commit_of("one")) as root:
        os.rename(root.parent, root.parent.with_name("elsewhere"))

    assert Repository(checkout.folder).worktrees() == 1


def test_a_signal_ends_it_and_handlers_are_as_before(checkout: Checkout) -> None:
    before = signal.getsignal(signal.SIGTERM)

    with (
        pytest.raises(SystemExit) as ended,
        checkout.worktree(checkout.commit_of("one")) as root,
    ):
        signal.raise_signal(signal.SIGTERM)

    assert ended.value.code == 128 + signal.SIGTERM
    assert not root.exists()
    assert signal.getsignal(signal.SIGTERM) == before


def test_variables_of_a_hook_lead_nowhere_else(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))

    assert content(checkout, "one") == "1"


def test_git_must_be_there(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(ConfigError, match="compared with git, which is not installed"):
        checkout.commit_of("one")


def test_code_outside_of_a_checkout_has_no_revisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "inferkit" / "inspect" / "diff" / "worktree.py"
    monkeypatch.setattr(worktree, "__file__", str(file))

    with pytest.raises(ConfigError, match=r"runs from .*, which is none .*python -m inferkit in a"):
        find_checkout()
