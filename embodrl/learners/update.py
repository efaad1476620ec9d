"""Updates: optimizer steps on an engine, in the engine's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.shared_inputs import RowInputs
from embodrl.hybrid_engines.training.policy_engine import PolicyTrainEngine
from embodrl.hybrid_engines.training.remote import Sharing


class Update:
    """Drives an engine, in the driver or in every training process, independently of the backend.

    ``TrainEngine.attach`` creates it by class name. In other processes, methods are called with positional arguments
    and return values that ``embodrl.scheduler.messages`` can send. ``on_step`` is called with the finished and the
    total number of optimizer steps of an update.
    """

    def __init__(
        self, engine: PolicyTrainEngine, config: Config, on_step: Callable[[int, int], None] | None = None
    ) -> None:
        self.engine = engine
        self.config = config
        self._on_step = on_step

    @classmethod
    def rows_of_shares(cls, sharing: Sharing, method: str, args: Sequence[Any]) -> list[Tensor] | None:
        """Return the rows ``int64`` of the batch ``args[0]`` whose policy inputs each share reads in a method.

        None, the default, if every process gets the arguments as they are.
        """
        return None

    def hold(self, held: RowInputs | None) -> None:
        """Take the inputs that the next call reads in place of the batch's; None after it."""

    def steps(self, total: int) -> Iterator[int]:
        """Count the optimizer steps of an update from 0, and report each one when done."""
        for index in range(total):
            yield index
            if self._on_step is not None:
                self._on_step(index + 1, total)

    def complete(self) -> None:
        """End an update of several steps: increment the engine's version.

        Raises:
            NonFiniteError: weights are not finite.
        """
        self.engine.complete_update()
