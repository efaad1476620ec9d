"""What an update is: optimizer steps on an engine, in the process that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from embodrl.config.schema import Config
from embodrl.hybrid_engines.training.policy_engine import PolicyTrainEngine


class Update:
    """Drives an engine. It stands in the driver or in every training process, and sees no backend.

    ``TrainEngine.attach`` makes it by the name of its class. Where it stands in other processes its methods are called
    with positional arguments and answer with what ``embodrl.scheduler.messages`` can send.

    Args:
        engine: computes gradients and steps.
        config: the run.
        on_step: called with how many optimizer steps of an update are done, and how many there are.
    """

    def __init__(
        self, engine: PolicyTrainEngine, config: Config, on_step: Callable[[int, int], None] | None = None
    ) -> None:
        self.engine = engine
        self.config = config
        self._on_step = on_step

    def steps(self, total: int) -> Iterator[int]:
        """Count the optimizer steps of an update from 0, and report each when it is done."""
        for index in range(total):
            yield index
            if self._on_step is not None:
                self._on_step(index + 1, total)

    def complete(self) -> None:
        """End an update of several steps: raise the engine's version by one.

        Raises:
            NonFiniteError: weights are not finite.
        """
        self.engine.complete_update()
