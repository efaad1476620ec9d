"""Interface of every simulator: a batch of environments that steps in chunks.

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
from embodrl.names import nearest
from embodrl.types import EnvSpec, EnvStep, Observation

SavedState: TypeAlias = Any
"""Plain values and arrays from a simulator's own ``get_state``, in a format of its choice."""


def axis_unknown(simulator: object, axis: str) -> EnvError:
    """Return the error for an axis declared by a simulator's spec but unknown to its class."""
    name = type(simulator).__name__
    return EnvError(
        f"{name} has no axis '{axis}'", f"implement it in {name}, or remove it from the spec", code="axis-unknown"
    )


class VectorEnv(ABC):
    """B environments in one process.

    Constructors take keyword arguments of plain types only, since these cross a process boundary as JSON.
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
            seeds: ``int64[N]``, one initial state each; equal seed and task give equal states.
            task_ids: ``int32[N]``, indices into ``spec.tasks``.
            indices: ``int64[N]``, environments to reset.

        Returns:
            observation of all B environments.
        """

    @abstractmethod
    def chunk_step(self, actions: NDArray[np.float32], active: NDArray[np.bool_]) -> EnvStep:
        """Execute ``actions float32[B,C,A]`` in order; render only what the policy will see next.

        Rows where ``active bool[B]`` is False are not simulated: their ``valid`` is False throughout. With auto-reset,
        the episode after seed s has the seed ``stepping.next_seed(s)``, so that restarts repeat it.
        """

    @abstractmethod
    def get_state(self) -> bytes:
        """Return the full simulator state (all environments, random generators, counters), without pickles."""

    @abstractmethod
    def set_state(self, state: bytes) -> None:
        """Continue bit-exactly from a state of ``get_state``."""

    def get_row_state(self, row: int) -> dict[str, object]:
        """Return the state of one environment as plain values and arrays; the others continue."""
        raise NotImplementedError(f"{type(self).__name__} can't save the state of single environments")

    def set_row_state(self, row: int, state: Mapping[str, SavedState]) -> object:
        """Continue ``row`` bit-exactly from a state of ``get_row_state``, possibly of another row.

        ``SteppingEnv`` also takes actions to execute (``REPLAY``), and returns how many it executed (``steps``) and
        whether the episode then ``ended`` and began again.
        """
        raise NotImplementedError(f"{type(self).__name__} can't restore the state of single environments")

    def set_auto_reset(self, value: bool) -> None:
        """Set whether the next episode begins at the end of the chunk in which one has ended."""
        raise NotImplementedError(f"{type(self).__name__} has no set_auto_reset")

    def set_ignore_terminations(self, value: bool) -> None:
        """Set whether only a step limit ends an episode."""
        raise NotImplementedError(f"{type(self).__name__} has no set_ignore_terminations")

    def set_axis(self, axis: str) -> None:
        """Perturb all episodes along an axis named by the simulator's spec; called once, before any reset."""
        raise axis_unknown(self, axis)

    def set_real_time(self, settings: Mapping[str, object]) -> None:
        """Act in wall-clock time as configured by ``env.real_time``; called once, before any reset."""
        raise EnvError(
            f"{type(self).__name__} has no clock",
            "derive it from SteppingEnv, or leave env.real_time out",
            code="no-clock",
        )

    def describe(self) -> dict[str, object]:
        """Return versions and graphics driver of this process; see ``describe_simulator``."""
        return describe_simulator()

    def status(self) -> dict[str, float]:
        """Return control metrics since the last call; empty without a clock."""
        return {}

    # The next eight are optional: simulators without history, people's cameras or experts need none of them.

    def solved_now(self) -> NDArray[np.bool_] | None:
        """Return ``bool[B]``: the task was solved after the last step of an environment; None if unknown."""
        return None

    def check_state(self) -> str:
        """Return why ``get_state`` is unavailable, checked before a run begins; "" if available."""
        return ""

    def check_row_state(self) -> str:
        """Return why ``get_row_state`` is unavailable; "" if available."""
        kept = type(self).get_row_state is not VectorEnv.get_row_state
        return "" if kept else f"{type(self).__name__} can't save the state of single environments"

    def check_episodes(self) -> list[str]:
        """Return codes of problems with episodes: ``seed-ignored``, ``instruction-empty``. Called before any reset."""
        return []

    def rebuild(self) -> None:  # noqa: B027
        """Discard all history: what follows a reset then depends only on its seed. A no-op for most simulators."""

    def mark(self) -> None:  # noqa: B027
        """Mark this moment for ``rewind``. A no-op if a reset discards all history."""

    def rewind(self) -> None:  # noqa: B027
        """Make ``get_state`` ignore everything since ``mark``; a reset must follow."""

    def start_video(self, row: int, path: str) -> None:  # noqa: B027
        """Record the coming episode to ``<path>_success.mp4`` or ``<path>_failure.mp4``."""

    def expert_reset(self, rows: list[int]) -> None:  # noqa: B027
        """Start scripted experts in ``rows``, whose episodes have just begun."""

    def expert_actions(self) -> NDArray[np.float32]:
        """Return the scripted experts' actions, ``float32[B,A]``."""
        raise NotImplementedError(f"{type(self).__name__} has no scripted experts")

    def call(self, method: str, arguments: Mapping[str, object]) -> object:
        """Answer a rare, small request from ``REQUESTS`` with plain values and arrays; EnvError if it is unknown."""
        if method not in self.REQUESTS:
            near = nearest(method, list(self.REQUESTS))
            raise EnvError(
                f"{type(self).__name__} has no request '{method}'",
                f"{f'nearest: {near}; ' if near else ''}known: {', '.join(self.REQUESTS)}",
                code="env-method",
            )
        return getattr(self, method)(**arguments)

    @abstractmethod
    def close(self) -> None:
        """Free the simulator."""
