"""Workflows: the course of an episode, as a user's coroutine, and the trajectory it returns.

Shapes: T policy steps (chunks), B episodes, C actions in a chunk, A action dimensions, K values per chunk, H x W image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodrl.algorithms.episodes import split_episodes
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.environment import Environment, ToolResult
from embodrl.errors import EmbodrlError, EnvQuarantined, EnvRaised, EnvTimeout, EnvWorkerDied, RolloutEngineError
from embodrl.hybrid_engines.rollout.batched import Completion, EpisodeEngine
from embodrl.models.common.chat import Message
from embodrl.types import Observation, PolicyOutput
from embodrl.workers.episode import JUDGED, episode_of
from embodrl.workers.recorders import NOT_JUDGED, Judge, Judging

BEYOND_REPAIR = (EnvQuarantined, EnvRaised, EnvWorkerDied, EnvTimeout, RolloutEngineError)
"""Errors of an episode that end the run."""


@dataclass(frozen=True)
class EpisodeTask:
    """The episode to run.

    Attributes:
        name: task name, one of ``env.tasks``.
        task_id: its index there.
        seed: seed of the initial state; equal for the episodes of a group.
        max_chunks: maximum length of a trajectory in chunks; in evaluations, that of an episode.
        iteration: iteration of the run; 0 in evaluations.
        keep_frames: record the first camera's images for judging.
        data: what a script submitted with the episode (``EpisodePlayer.submit``); empty for others.
    """

    name: str
    task_id: int
    seed: int
    max_chunks: int
    iteration: int
    keep_frames: bool = False
    data: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)


@dataclass
class Chunk:
    """One chunk of actions and its results; the columns of TrajectoryBatch for one T and one B.

    Attributes:
        forward_inputs: tensors ``[1,...]``.
        logprobs: ``float32[C,A]``, or ``float32[M,1]`` for tokens that stand for the whole chunk.
        values: ``float32[K]``, zeros without a value head.
        rewards: ``float32[C]``.
        valid, terminated, truncated: ``bool[C]``.
        success: the task has been solved at some step of the episode.
        policy_version: number of updates behind the policy.
        frame: ``uint8[H,W,3]``, first-camera image afterwards; None where it is not wanted.
        call_id: number of the reward call that judges the episode which ends here; -1 for none.
    """

    forward_inputs: dict[str, Tensor]
    logprobs: Tensor
    values: Tensor
    rewards: Tensor
    valid: Tensor
    terminated: Tensor
    truncated: Tensor
    success: bool
    policy_version: int
    frame: Tensor | None = None
    call_id: int = -1


@dataclass
class Trajectory:
    """One episode.

    Attributes:
        task: the episode's task.
        chunks: chunks so far.
        end_value: ``float32[K]``, value of the last observation if the step limit or the workflow cut the episode off
            there; None for zero.
        end_version: policy version of ``end_value``; -1 if unknown.
    """

    task: EpisodeTask
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    end_value: Tensor | None = None
    end_version: int = -1

    def add(self, output: PolicyOutput, result: ToolResult) -> None:
        """Append the policy's output (a batch of one) and the result of ``act`` for its first actions."""
        executed = len(result.valid)
        chunk = output.actions.shape[1]
        if not 0 < executed <= chunk:
            raise EmbodrlError(
                f"a result of {executed} actions; the chunk has {chunk}",
                "add the unmodified result of `act` to its output",
                code="workflow-trajectory",
            )

        def padded(column: object) -> Tensor:
            tensor = torch.as_tensor(column)
            return torch.cat([tensor, tensor.new_zeros(chunk - executed)])

        self.chunks.append(
            Chunk(
                forward_inputs=output.forward_inputs,
                logprobs=output.logprobs[0],
                values=torch.zeros(1) if output.values is None else output.values[0],
                rewards=padded(result.reward),
                valid=padded(result.valid),
                terminated=padded(result.terminated),
                truncated=padded(result.truncated),
                success=result.success,
                policy_version=output.version,
                frame=torch.from_numpy(result.observation.images[0, 0].copy()) if self.task.keep_frames else None,
            )
        )

    def add_message(
        self,
        completion: Completion,
        reward: float = 0.0,
        terminated: bool = False,
        success: bool = False,
        observation: Observation | None = None,
    ) -> None:
        """Append a message: one chunk of one element, with the reward of what its tool calls did.

        ``terminated`` ends the episode there, so that no value follows; ``observation`` is for rewards that judge
        frames.
        """
        output = completion.output
        frame = None if observation is None else torch.from_numpy(observation.images[0, 0].copy())
        self.chunks.append(
            Chunk(
                forward_inputs=output.forward_inputs,
                logprobs=output.logprobs[0],
                values=torch.zeros(1) if output.values is None else output.values[0],
                rewards=torch.tensor([reward], dtype=torch.float32),
                valid=torch.tensor([True]),
                terminated=torch.tensor([terminated]),
                truncated=torch.tensor([False]),
                success=success,
                policy_version=output.version,
                frame=frame if self.task.keep_frames else None,
            )
        )

    def add_reward(self, reward: float) -> None:
        """Add a reward to the last executed action; does nothing without one."""
        for chunk in reversed(self.chunks):
            if chunk.valid.any():
                chunk.rewards[int(chunk.valid.nonzero()[-1])] += reward
                return

    def end(self, result: ToolResult) -> None:
        """End with another agent's action: the last executed one gets the success and the end of its result."""
        for chunk in reversed(self.chunks):
            if chunk.valid.any():
                last = int(chunk.valid.nonzero()[-1])
                chunk.success = result.success
                chunk.terminated[last] = bool(result.terminated.any())
                chunk.truncated[last] = bool(result.truncated.any())
                return

    async def finish(self, engine: EpisodeEngine, observation: Observation | Sequence[Message]) -> None:
        """Compute ``end_value`` if it matters: call once, with the last observation, or the conversation so far."""
        last = self.chunks[-1] if self.chunks else None
        if engine.has_values and last is not None and not last.terminated.any() and not self.lost:
            before = engine.version
            self.end_value = (await engine.values(observation))[0]
            self.end_version = before if engine.version == before else -1

    @property
    def done(self) -> bool:
        """Whether the environment ended the episode."""
        return bool(self.chunks) and bool((self.chunks[-1].terminated | self.chunks[-1].truncated).any())

    @property
    def lost(self) -> bool:
        """Whether a simulator fault ended the episode."""
        return self.done and not bool(self.chunks[-1].valid.any())

    @property
    def success(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].success

    @property
    def total_reward(self) -> float:
        return float(sum(float(chunk.rewards[chunk.valid].sum()) for chunk in self.chunks))

    @property
    def num_actions(self) -> int:
        return sum(int(chunk.valid.sum()) for chunk in self.chunks)


class RolloutWorkflow(ABC):
    """Defines how an episode runs: subclass it and set ``rollout.workflow=module:Class``; no constructor arguments.

    One instance runs all episodes concurrently: keep per-episode state inside ``run_episode``.

    Attributes:
        agents: names of the agents that act in an episode, all with the run's policy; empty for a single one. They are
            known by what they observe or read, and trained alike, each on its own trajectory.
    """

    agents: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    async def run_episode(
        self, engine: EpisodeEngine, env: Environment, task: EpisodeTask
    ) -> Trajectory | Mapping[str, Trajectory] | None:
        """Run one episode.

        Blocking calls hold up all the others: wrap them in ``asyncio.to_thread``.

        Args:
            engine: maps observations to actions.
            env: the episode's own environment.
            task: the episode to run.

        Returns:
            the trajectory; with ``agents``, one by name for each of them, without chunks if it had no turn. None
            rejects the episode: it is counted and not trained on.
        """


class ChunkWorkflow(RolloutWorkflow):
    """Observe, act, execute until the episode ends: the default course without ``rollout.workflow``, asynchronously."""

    async def run_episode(self, engine: EpisodeEngine, env: Environment, task: EpisodeTask) -> Trajectory:
        trajectory = Trajectory(task)
        observation = await env.initialize(task.name, task.seed)
        for _ in range(task.max_chunks):
            output = await engine.act(observation)
            result = await env.execute("act", {"actions": output.actions[0]})
            trajectory.add(output, result)
            observation = result.observation
            if result.done:
                break
        await trajectory.finish(engine, observation)
        return trajectory


def stack_trajectories(
    trajectories: Sequence[Trajectory | None],
    num_steps: int,
    group_id: Tensor,
    bootstrap: bool = True,
    judging: Judging = NOT_JUDGED,
) -> TrajectoryBatch:
    """Return the batch ``[T,B]`` of trajectories, padded with invalid chunks.

    An episode shorter than ``num_steps`` that the environment did not end was cut off by its workflow; it counts as
    truncated there. None becomes the column of a lost episode, which is not trained on.

    Args:
        trajectories: B of them, at least one with a chunk.
        num_steps: T.
        group_id: ``int64[B]``, equal where episodes began in the same initial state.
        bootstrap: use the values of last observations where episodes were truncated.
        judging: whether the columns ``frames`` and ``call_id`` are included.

    Raises:
        EmbodrlError: a trajectory is longer than T or lacks required frames, or there is none.
    """
    template = next((t for t in trajectories if t is not None and t.chunks), None)
    if template is None:
        raise EmbodrlError("there is no trajectory to stack", "return at least one", code="workflow-trajectory")
    executed = [t if t is not None and t.chunks else None for t in trajectories]
    columns = [_column(trajectory, template, num_steps, bootstrap, judging) for trajectory in executed]
    inputs = {
        name: torch.stack([column["forward_inputs"][name] for column in columns], dim=1)
        for name in columns[0]["forward_inputs"]
    }
    names = columns[0].keys() - {"forward_inputs"}
    stacked: dict[str, Any] = {name: torch.stack([column[name] for column in columns], dim=1) for name in names}
    stacked["group_id"] = group_id.expand(stacked["task_id"].shape)
    return TrajectoryBatch.from_rollout(forward_inputs=inputs, **stacked)


def _column(
    trajectory: Trajectory | None, template: Trajectory, num_steps: int, bootstrap: bool, judging: Judging
) -> dict[str, Any]:
    """Return the columns ``[T,...]`` of one episode, with ``values [T+1,K]``."""
    executed = trajectory or Trajectory(template.task, template.chunks[:1])
    chunks = executed.chunks
    if len(chunks) > num_steps:
        raise EmbodrlError(
            f"a workflow returned a trajectory of {len(chunks)} chunks; the limit is {num_steps}",
            "stop at task.max_chunks, or raise env.train.max_steps_per_rollout_epoch",
            code="workflow-trajectory",
        )
    zeros = {name: _filled([getattr(chunk, name) for chunk in chunks], num_steps, zero=True) for name in _ZERO_AFTER}
    values = torch.cat([zeros["values"], torch.zeros_like(zeros["values"][:1])])
    bootstrap_values = torch.zeros_like(zeros["values"])
    value_version = torch.full((num_steps,), -1, dtype=torch.int64)
    last = len(chunks) - 1
    if trajectory is None:
        zeros = {name: torch.zeros_like(column) for name, column in zeros.items()}
        zeros["truncated"][0, 0] = True
        values = torch.zeros_like(values)
    else:
        zeros["truncated"][: len(chunks)] = _truncated(trajectory, num_steps)
        if trajectory.end_value is not None:
            if not zeros["truncated"][last].any():
                values[-1] = trajectory.end_value
                value_version[-1] = trajectory.end_version
            elif bootstrap:
                bootstrap_values[last] = trajectory.end_value
                value_version[last] = trajectory.end_version
    kept: Mapping[str, list[Tensor]] = {
        "success": [torch.tensor(chunk.success and trajectory is not None) for chunk in chunks],
        "policy_version": [torch.tensor(chunk.policy_version) for chunk in chunks],
        **({"frames": _frames(executed)} if judging.keep_frames else {}),
    }
    return {
        **zeros,
        **{name: _filled(column, num_steps) for name, column in kept.items()},
        **({"call_id": _call_ids(trajectory, num_steps)} if judging.judge is not None else {}),
        "task_id": torch.full((num_steps,), executed.task.task_id, dtype=torch.int64),
        "values": values,
        "bootstrap_values": bootstrap_values,
        "value_version": value_version,
        # Copies, not zeros: a network need not handle an observation that never occurred.
        "forward_inputs": {
            name: _filled([chunk.forward_inputs[name][0] for chunk in chunks], num_steps)
            for name in chunks[0].forward_inputs
        },
    }


def judged(trajectory: Trajectory, num_steps: int, tasks: Sequence[str], judge: Judge) -> Trajectory:
    """Have what a workflow returned judged; return it with the ``call_id`` of its chunks.

    Args:
        trajectory: of at most ``num_steps`` chunks. Like a batch's column it is one episode, or several if actions
            follow the end of one.
        num_steps: T.
        tasks: task names.
        judge: see ``Judging``.

    Raises:
        EmbodrlError: the trajectory lacks frames.
    """
    chunks = [replace(chunk, call_id=-1) for chunk in trajectory.chunks]
    returned = copy(trajectory)  # the workflow may keep its own
    returned.chunks = chunks
    if not chunks:
        return returned
    columns = {name: torch.stack([torch.as_tensor(getattr(chunk, name)) for chunk in chunks]) for name in _OF_CHUNKS}
    columns |= {"truncated": _truncated(trajectory, num_steps), "frames": torch.stack(_frames(trajectory))}
    ends = (columns[name][:, None] for name in ("valid", "terminated", "truncated"))
    episodes = split_episodes(*ends)
    for number, end in enumerate(episodes.end.tolist()):
        of_episode = episodes.index[:, 0] == number
        episode = episode_of({name: columns[name][of_episode] for name in JUDGED}, tasks[trajectory.task.task_id])
        chunks[end].call_id = judge(episode)
    return returned


def _truncated(trajectory: Trajectory, num_steps: int) -> Tensor:
    """Return ``truncated`` of the chunks, ``bool[t,C]``; also where the workflow cut the episode off."""
    chunks = trajectory.chunks
    truncated = torch.stack([chunk.truncated for chunk in chunks])
    if not trajectory.done and len(chunks) < num_steps and chunks[-1].valid.any():
        truncated[-1, int(chunks[-1].valid.nonzero()[-1])] = True
    return truncated


def _call_ids(trajectory: Trajectory | None, num_steps: int) -> Tensor:
    numbers = [] if trajectory is None else [chunk.call_id for chunk in trajectory.chunks]
    return torch.tensor(numbers + [-1] * (num_steps - len(numbers)), dtype=torch.int64)


def _frames(trajectory: Trajectory) -> list[Tensor]:
    frames = [chunk.frame for chunk in trajectory.chunks if chunk.frame is not None]
    if len(frames) < len(trajectory.chunks):
        raise EmbodrlError(
            "a workflow returned a trajectory without frames, which this run's rewards need",
            "create it as Trajectory(task), with the task passed to run_episode",
            code="workflow-trajectory",
        )
    return frames


_OF_CHUNKS = [name for name in JUDGED if name not in ("frames", "truncated")]
_ZERO_AFTER = ("logprobs", "values", "rewards", "valid", "terminated", "truncated")


def _filled(column: Sequence[Tensor], num_steps: int, zero: bool = False) -> Tensor:
    """Return ``[T,...]``: the entries, then zeros or copies of the last one."""
    rest = torch.zeros_like(column[-1]) if zero else column[-1]
    return torch.stack([*column, *[rest] * (num_steps - len(column))])
