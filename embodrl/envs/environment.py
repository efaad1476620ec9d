"""Asynchronous environment for workflows, running one episode at a time.

Shapes: C actions in a chunk, A action dimensions. Observations are batches of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embodrl.types import EnvStep, Observation


@dataclass(frozen=True)
class Tool:
    """A tool for ``execute``, with a one-line description and the JSON schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, object]


@dataclass
class ToolResult:
    """Result of a tool.

    Attributes:
        observation: observation after the tool; at the end of an episode, its last observation.
        reward: ``float32[C]``, 0 where not valid; C is 0 for a tool that does not act.
        valid: ``bool[C]``, the action was executed (the episode had not ended before it).
        terminated, truncated: ``bool[C]``, the episode ended with that action.
        success: the task was solved at some point of the episode.
        episode_return: sum of the episode's rewards so far.
        episode_length: environment steps of the episode so far.
        lost: a simulator fault ended the episode: nothing is valid, ``truncated`` at the first action.
        value: answer of a tool that does not act, plain values.
    """

    observation: Observation
    reward: NDArray[np.float32]
    valid: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: bool = False
    episode_return: float = 0.0
    episode_length: int = 0
    lost: bool = False
    value: object = None

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return bool((self.terminated | self.truncated).any())

    @staticmethod
    def answer(observation: Observation, value: object) -> ToolResult:
        """Return the result of a tool that does not act."""
        nothing = np.zeros(0, np.bool_)
        return ToolResult(observation, np.zeros(0, np.float32), nothing, nothing, nothing, value=value)

    @staticmethod
    def of_row(step: EnvStep, row: int) -> ToolResult:
        """Return one row of a step without auto-reset, as a copy."""
        rows = np.array([row])
        ended = step.final_observation is not None and bool(step.final_mask[row])
        seen = step.final_observation if ended and step.final_observation is not None else step.observation
        valid = step.valid[row].copy()
        truncated = step.truncated[row].copy()
        return ToolResult(
            observation=seen.select(rows),
            reward=step.reward[row].copy(),
            valid=valid,
            terminated=step.terminated[row].copy(),
            truncated=truncated,
            success=bool(step.success[row]),
            episode_return=float(step.episode_return[row]),
            episode_length=int(step.episode_length[row]),
            lost=not valid.any() and bool(truncated[0]),
        )

    @staticmethod
    def lost_chunk(observation: Observation, chunk: int) -> ToolResult:
        """Return the result of ``chunk`` actions prevented by a fault."""
        nothing = np.zeros(chunk, np.bool_)
        truncated = nothing.copy()
        truncated[0] = True
        return ToolResult(observation, np.zeros(chunk, np.float32), nothing, nothing.copy(), truncated, lost=True)


class Environment(ABC):
    """An environment running one episode at a time.

    Every method but ``list_tools`` may take long; other episodes continue meanwhile.
    """

    @abstractmethod
    async def initialize(self, task: str, seed: int) -> Observation:
        """Begin a new episode; equal task and seed give equal initial states.

        Raises EnvError if the task is unknown, or the simulator beyond repair.
        """

    @abstractmethod
    def list_tools(self) -> list[Tool]:
        """Return the available tools."""

    @abstractmethod
    async def execute(self, tool: str, arguments: Mapping[str, object]) -> ToolResult:
        """Use a tool.

        Raises:
            EnvError: unknown tool, invalid arguments, no episode in progress, or the simulator is beyond repair. A
                fault that only costs the episode is not an error; see ``ToolResult.lost``.
        """

    @abstractmethod
    async def get_state(self) -> bytes:
        """Return the full state of the episode."""

    @abstractmethod
    async def load_state(self, state: bytes) -> Observation:
        """Continue bit-exactly from a state of ``get_state``, possibly of another environment of the same kind.

        Raises EnvError if the simulator can't restore the state of single environments.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release the environment; an episode in progress is abandoned."""
