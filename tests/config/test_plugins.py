"""Plugins of Hydra that are not there."""

import pytest

from inferkit.config.overrides import compose_checked
from inferkit.config.plugins import EXTRAS, missing_in_file, missing_plugin
from inferkit.config.space import ConfigSpace


@pytest.mark.parametrize("choice", EXTRAS)
def test_the_extra_that_brings_a_plugin_is_named(choice):
    assert missing_plugin(choice).endswith(f"pip install 'inferkit[{EXTRAS[choice]}]'")


def test_an_unknown_choice_is_left_to_others():
    assert missing_plugin("hydra/sweeper=optima") == ""
    assert missing_in_file("Could not find 'parallel/tp3'") == ""


def test_a_file_that_chooses_one_says_which():
    message = "In 'hydra/config': Could not find 'hydra/sweeper/optuna'\n\nAvailable options"
    assert missing_in_file(message).startswith("chooses hydra/sweeper=optuna, which is a plugin")


def test_keys_of_an_option_that_is_not_there_are_no_second_fault():
    words = ["hydra/launcher=nope", "hydra.launcher.partition=x", "scheduler.bath_size=3"]
    faults = compose_checked(ConfigSpace(), words).faults
    assert [fault.key for fault in faults] == ["hydra/launcher", "scheduler.bath_size"]
