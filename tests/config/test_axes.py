"""Axes that a file of conf/sweep names."""

from inferkit.config.axes import swept
from inferkit.config.space import ConfigSpace

SPACE = ConfigSpace()


def test_axes_of_a_file_without_those_that_are_typed() -> None:
    words = ["+sweep=split", "parallel=tp2"]

    assert swept(SPACE.compose(words).hydra, words) == {"scheduler.batch_size": "2,4,8"}
    assert swept(SPACE.compose([]).hydra, []) == {}
