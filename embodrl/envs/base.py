"""The interface of every simulator: a batch of environments that steps in chunks.

Shapes: B environments, C actions in a chunk, A action dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.provenance import describe_simulator
from embodrl.errors import EnvError
from embodrl.types import EnvSpec, EnvStep, Observation

SavedState: TypeAlias = Any
"""Plain values and arrays as a simulator's own ``get_state`` returned them; each simulator knows what they are."""


def axis_unknown(simulator: object, axis: str) -> EnvError:
    """Return the error for an axis that a simulator's spec names and its class does not know."""
    name = type(simulator).__name__
    return EnvError(f"{name} has no axis '{axis}'", f"give {name} what its spec declares", code="axis-unknown")


class VectorEnv(ABC):
    """B environments of one process.

    A constructor takes keyword arguments of plain types only (they cross a process border as JSON).
    """

    spec: EnvSpec
    REQUESTS = (
        "set_auto_reset",
        "set_ignore_terminations",
        "solved_now",
        "describe",
        "rebuild",
        "mark",
        "rewind",
        "start_video",
        "expert_reset",
        "expert_actions",
        "get_row_state",
        "set_row_state",
        "check_state",
        "check_row_state",
        "check_episodes",
        "status",
    )

    @abstractmethod
    def reset(self, seeds: NDArray[np.int64], task_ids: NDArray[np.int32], indices: NDArray[np.int64]) -> Observation:
        """Start new episodes.

        Args:
            seeds: ``int64[N]``, one initial state each; the same seed and task give the same state.
            task_ids: ``int32[N]``, index into ``spec.tasks``.
            indices: ``int64[N]``, which environments.

        Returns:
            The observation of all B environments.
        """

    @abstractmethod
    def chunk_step(self, actions: NDArray[np.float32], active: NDArray[np.bool_]) -> EnvStep:
        """Execute ``actions float32[B,C,A]`` in order; render only what the policy will see next.

        Rows where ``active bool[B]`` is False are not simulated: their ``valid`` is False throughout. With auto-reset
        the episode after one of seed s has the seed ``stepping.next_seed(s)``: restarts run that again.
        """

    @abstractmethod
    def get_state(self) -> bytes:
        """Return the full simulator state (all environments, random generators, counters), free of pickled code."""

    @abstractmethod
    def set_state(self, state: bytes) -> None:
        """Continue bit-exactly from a state of ``get_state``."""

    def get_row_state(self, row: int) -> dict[str, object]:
        """Return the state of one environment as plain values and arrays; the others continue."""
        raise NotImplementedError(f"{type(self).__name__} keeps no state of single environments")

    def set_row_state(self, row: int, state: Mapping[str, SavedState]) -> None:
        """Continue in ``row`` from what ``get_row_state`` returned, maybe for another row, bit-exactly."""
        raise NotImplementedError(f"{type(self).__name__} keeps no state of single environments")

    def set_auto_reset(self, value: bool) -> None:
        """Say whether the next episode begins at the end of the chunk in which one has ended."""
        raise NotImplementedError(f"{type(self).__name__} has no set_auto_reset")

    def set_ignore_terminations(self, value: bool) -> None:
        """Say whether only a step limit ends an episode."""
        raise NotImplementedError(f"{type(self).__name__} has no set_ignore_terminations")

    def set_axis(self, axis: str) -> None:
        """Perturb all episodes along an axis that the simulator's spec names; asked once, before any reset."""
        raise axis_unknown(self, axis)

    def set_real_time(self, settings: Mapping[str, object]) -> None:
        """Act in wall-clock time as ``env.real_time`` says; asked once, before any reset."""
        raise EnvError(
            f"{type(self).__name__} has no clock",
            "derive it from SteppingEnv, or leave env.real_time out",
            code="no-clock",
        )

    def describe(self) -> dict[str, object]:
        """Return versions and graphics driver of this process; see ``describe_simulator``."""
        return describe_simulator()

    def status(self) -> dict[str, float]:
        """Return how control has gone since last asked, for metrics; nothing where there is no clock."""
        return {}

    # The next eight are optional: a simulator without history, cameras for people or experts has nothing to do.

    def solved_now(self) -> NDArray[np.bool_] | None:
        """Return ``bool[B]``: the task was solved after the last step of an environment; None if that is not known."""
        return None

    def check_state(self) -> str:
        """Return why ``get_state`` can't be asked, which a run wants to know before it begins; "" if it can."""
        return ""

    def check_row_state(self) -> str:
        """Return why ``get_row_state`` can't be asked; "" if it can."""
        kept = type(self).get_row_state is not VectorEnv.get_row_state
        return "" if kept else f"{type(self).__name__} keeps no state of single environments"

    def check_episodes(self) -> list[str]:
        """Return the codes of what is wrong with episodes: ``seed-ignored``, ``instruction-empty``. Before any reset.

        A simulator that is known to be seeded has nothing to do.
        """
        return []

    def rebuild(self) -> None:  # noqa: B027
        """Forget all history: what follows a reset depends on its seed alone. Nothing to do for most simulators."""

    def mark(self) -> None:  # noqa: B027
        """Remember this moment for ``rewind``. Nothing to do where a reset forgets all history."""

    def rewind(self) -> None:  # noqa: B027
        """Let ``get_state`` answer as if nothing had happened since ``mark``; a reset must follow."""

    def start_video(self, row: int, path: str) -> None:  # noqa: B027
        """Film the episode that is about to be run, into ``<path>_success.mp4`` or ``<path>_failure.mp4``."""

    def expert_reset(self, rows: list[int]) -> None:  # noqa: B027
        """Start scripted experts in ``rows``, whose episodes have just begun."""

    def expert_actions(self) -> NDArray[np.float32]:
        """Return what scripted experts would do now, ``float32[B,A]``."""
        raise NotImplementedError(f"{type(self).__name__} has no scripted experts")

    def call(self, method: str, arguments: Mapping[str, object]) -> object:
        """Answer a rare, small request: one of ``REQUESTS``, by name; plain values and arrays in and out.

        Raises:
            EnvError: no such request.
        """
        if method not in self.REQUESTS:
            raise EnvError(
                f"{type(self).__name__} has no request '{method}'",
                f"known: {', '.join(self.REQUESTS)}",
                code="env-method",
            )
        return getattr(self, method)(**arguments)

    @abstractmethod
    def close(self) -> None:
        """Free the simulator."""
