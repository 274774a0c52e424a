"""When a process that has ended is started again, and when it is given up."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class RestartPolicy:
    """Of one child: waits 1, 2, 4, ... seconds between its lives, and starts over after a long one.

    Args:
        first_delay_s: before the first restart; doubles with every further quick death.
        max_delay_s: the longest delay.
        long_life_s: a child that lived so long was well: its next death counts as the first.
        max_quick_deaths: so many in a row, and it is given up.
    """

    first_delay_s: float = 1.0
    max_delay_s: float = 30.0
    long_life_s: float = 60.0
    max_quick_deaths: int = 5
    num_quick_deaths: int = 0

    def on_death(self, life_s: float) -> float | None:
        """Seconds until the next life; None = there is none."""
        if life_s >= self.long_life_s:
            self.num_quick_deaths = 0
        self.num_quick_deaths += 1
        if self.num_quick_deaths >= self.max_quick_deaths:
            return None
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** (self.num_quick_deaths - 1))
