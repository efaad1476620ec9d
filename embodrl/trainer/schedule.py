"""When a run evaluates, saves and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from embodrl.config.schema import Config


@dataclass(frozen=True)
class Schedule:
    """Schedule in iterations; for imitation, in optimizer steps.

    Attributes:
        total: number after which the run is done.
        eval_interval: interval of evaluations; 0 for none.
        save_interval: interval of checkpoints, besides the last one; 0 for none.
        evaluates_first: evaluate before the first update.
        evaluates_last: evaluate after the last one, whatever the interval.
        saves_first: save before the first update.
    """

    total: int
    eval_interval: int
    save_interval: int
    evaluates_first: bool = False
    evaluates_last: bool = False
    saves_first: bool = False

    @classmethod
    def of_training(cls, config: Config) -> Self:
        """Return the schedule of the section ``runner``."""
        runner = config.runner
        first = runner.eval_at_start
        intervals = (runner.eval_interval, runner.save_interval)
        from_store = config.store_url is not None  # collectors get the initial weights, too, which follow a checkpoint
        last = not config.trains_beside_a_robot
        return cls(runner.max_iterations, *intervals, first, evaluates_last=last, saves_first=from_store)

    @classmethod
    def of_imitation(cls, config: Config) -> Self:
        """Return the schedule of the section ``sft``."""
        return cls(config.sft.max_steps, config.sft.eval_interval, config.sft.save_interval)

    def is_evaluated(self, iteration: int) -> bool:
        """Return whether the policy is evaluated after so many iterations."""
        if iteration == 0:
            return self.evaluates_first
        is_last = self.evaluates_last and iteration == self.total
        return is_last or (self.eval_interval > 0 and iteration % self.eval_interval == 0)

    def is_first_or_last(self, iteration: int) -> bool:
        """Return whether an evaluation after so many iterations is the one before training or the last one."""
        return not iteration or not self.evaluations_after(iteration)

    def evaluations_after(self, iteration: int) -> int:
        """Return the number of evaluations after so many iterations."""
        interval = self.eval_interval
        count = self.total // interval - iteration // interval if interval else 0
        is_extra = self.evaluates_last and iteration < self.total and not (interval and self.total % interval == 0)
        return count + is_extra

    def is_saved(self, iteration: int) -> bool:
        """Return whether a checkpoint is due after so many iterations."""
        return iteration > 0 and self.save_interval > 0 and iteration % self.save_interval == 0
