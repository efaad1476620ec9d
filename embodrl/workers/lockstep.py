"""A group of environments that is run in lockstep, chunk by chunk.

Shapes: T policy steps (chunks), B environments of the stage, K values per chunk, H x W image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.replay import POLICY
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.pool.pool import EnvPool
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.processes.trace import record
from embodrl.specs import LOSSES
from embodrl.types import CHOSEN, EnvStep, Observation, PolicyOutput
from embodrl.workers.corrector import Corrector
from embodrl.workers.reward import Episode

NO_VERSION = -1
"""Of values that are zeros, or that may be of several versions of the weights."""


@dataclass
class EpisodeStats:
    """Outcomes of the episodes that ended in a rollout.

    Attributes:
        successes, episodes: how many, without those that were lost.
        lost: how many a fault ended.
        cut: how many had begun and were cut off by the end of the rollout, before an outcome.
        returns, lengths: sums of rewards and of environment steps, over ``episodes``.
        solved_returns: sum of rewards over ``successes``.
        by_task: task -> [successes, episodes], of all tasks that could have been run.
    """

    successes: int = 0
    episodes: int = 0
    lost: int = 0
    cut: int = 0
    returns: float = 0.0
    solved_returns: float = 0.0
    lengths: int = 0
    by_task: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    @staticmethod
    def of(tasks: Sequence[str]) -> EpisodeStats:
        """Return counts of zero."""
        return EpisodeStats(by_task={task: [0, 0] for task in tasks})

    def add(self, step: EnvStep, acted: NDArray[np.bool_], tasks: Sequence[str]) -> None:
        """Count the episodes that ended in a chunk; those that a fault ended are counted as lost only.

        Args:
            step: what the chunk led to.
            acted: ``bool[B]``, environments whose episodes were running before it.
            tasks: B of them, of these episodes.
        """
        done = step.done & acted
        lost = done & ~step.valid.any(axis=1)
        ended = done & ~lost
        self.lost += int(lost.sum())
        self.episodes += int(ended.sum())
        self.successes += int(step.success[ended].sum())
        # In float64 no order of adding up gives another sum: rollout processes add their parts.
        self.returns += float(step.episode_return[ended].sum(dtype=np.float64))
        self.solved_returns += float(step.episode_return[ended & step.success].sum(dtype=np.float64))
        self.lengths += int(step.episode_length[ended].sum())
        for row in np.flatnonzero(ended).tolist():
            self.add_to_task(tasks[row], bool(step.success[row]))

    def add_to_task(self, task: str, success: bool) -> None:
        """Count an episode among those of its task."""
        successes, episodes = self.by_task.get(task, (0, 0))
        self.by_task[task] = [successes + success, episodes + 1]

    def merge(self, other: EpisodeStats) -> None:
        """Count those of another rollout as well."""
        for name, value in vars(other).items():
            if name != "by_task":
                setattr(self, name, getattr(self, name) + value)
        for task, counts in other.by_task.items():
            self.by_task[task] = [a + b for a, b in zip(self.by_task.get(task, (0, 0)), counts, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values of its own, of which ``EpisodeStats(**values)`` makes it again."""
        return asdict(self)

    def metrics(self) -> dict[str, float | None]:
        """Return means over the episodes, with several tasks of each as well; None where none has ended."""
        count, started, failed = self.episodes, self.episodes + self.cut, self.episodes - self.successes
        result = {
            "rollout/success_rate": self.successes / count if count else None,
            "rollout/return": self.returns / count if count else None,
            "rollout/return_solved": self.solved_returns / self.successes if self.successes else None,
            "rollout/return_failed": (self.returns - self.solved_returns) / failed if failed else None,
            "rollout/episode_length": self.lengths / count if count else None,
            "rollout/episodes": float(count),
            "rollout/lost_episodes": float(self.lost),
            "rollout/cut_episodes": float(self.cut),
            "rollout/success_rate_started": self.successes / started if started else None,
        }
        if len(self.by_task) > 1:
            for task, (successes, episodes) in self.by_task.items():
                result[f"rollout/{task}/success_rate"] = successes / episodes if episodes else None
                result[f"rollout/{task}/episodes"] = float(episodes)
        return result


@dataclass
class Seconds:
    """Time that a rollout has spent waiting for simulation and for the policy."""

    env: float = 0.0
    policy: float = 0.0

    def merge(self, other: Seconds) -> None:
        """Add those of another rollout."""
        self.env += other.env
        self.policy += other.policy


@dataclass(frozen=True)
class Shard:
    """What a group of environments runs in one go.

    Attributes:
        iteration: that its episodes belong to.
        seeds, task_ids: ``int64[B]`` and ``int32[B]``, of the first episode of each environment.
        group_id: ``int64[B]``, equal where episodes begin in the same initial state.
        random: numbers that what is drawn follows from.
    """

    iteration: int
    seeds: NDArray[np.int64]
    task_ids: NDArray[np.int32]
    group_id: Tensor
    random: Sequence[int]


class ShardMeta(TypedDict):
    """What is known of a shard apart from its columns, as JSON can hold it.

    Attributes:
        env_steps: that were simulated.
        episodes, seconds: arguments of ``EpisodeStats`` and ``Seconds``.
        counts, means: further metrics by name; see ``combine_extras``.
    """

    env_steps: NotRequired[int]
    episodes: dict[str, Any]
    seconds: dict[str, float]
    counts: NotRequired[dict[str, float]]
    means: NotRequired[dict[str, float]]


def shard_meta(batch: TrajectoryBatch, stats: EpisodeStats, seconds: Seconds) -> ShardMeta:
    """Return what is known of a shard."""
    return {
        "env_steps": int(batch.valid.sum()),
        "episodes": stats.as_dict(),
        "seconds": dict(vars(seconds)),
    }


def meta_of(batch: TrajectoryBatch) -> ShardMeta:
    """Return what a shard carries of ``shard_meta``, after its way through another process."""
    meta: ShardMeta = {"episodes": batch.meta["episodes"], "seconds": batch.meta["seconds"]}
    for name in ("env_steps", "counts", "means"):
        if name in batch.meta:
            meta[name] = batch.meta[name]
    return meta


def combine_extras(metas: Sequence[ShardMeta]) -> dict[str, float | None]:
    """Return further metrics of some shards: ``counts`` are added up, of ``means`` the mean is taken."""
    result: dict[str, float | None] = {}
    for name in {name for meta in metas for name in meta.get("counts", {})}:
        result[name] = float(sum(meta.get("counts", {})[name] for meta in metas))
    for name in {name for meta in metas for name in meta.get("means", {})}:
        result[name] = sum(meta.get("means", {})[name] for meta in metas) / len(metas)
    return dict(sorted(result.items()))


@dataclass(frozen=True)
class _Seen:
    """What a chunk led to, beside the columns of a batch.

    Attributes:
        images, states: after it; see ``LockstepRunner._after``.
        actions: ``float32[B,C,A]``.
        instruction: B of them.
    """

    images: NDArray[np.uint8]
    states: NDArray[np.float32]
    actions: NDArray[np.float32]
    instruction: list[str]


class LockstepRunner:
    """Environments that are simulated while the policy serves others, and what was gathered of them so far.

    ``begin``, then as often as there are chunks ``act`` (sends the actions) and ``receive`` (waits for what they led
    to), then ``stack``; or ``roll_out``, which does all of it. One thread uses a stage at a time.

    Args:
        config: the run.
        pool: its managers, started.
        engine: the policy.
        rows: its environments within the whole batch.
        keep_frames: keep what the first camera sees, for those who judge episodes by it.
        judge: gets every episode when it has ended, and the rollout's end those that continue; returns a ``call_id``.
    """

    def __init__(
        self,
        config: Config,
        pool: EnvPool,
        engine: RolloutEngine,
        rows: slice,
        keep_frames: bool,
        judge: Callable[[Episode], int] | None = None,
    ) -> None:
        self.config, self.pool, self.engine, self.rows = config, pool, engine, rows
        self.keep_frames, self.judge = keep_frames, judge
        self.num_steps = config.rollout_chunks
        self.auto_reset = config.env.train.auto_reset
        loss = LOSSES.entry(config.algorithm.loss_type)
        self.needs_values, self.off_policy = loss.needs_values, loss.off_policy and not loss.imitates
        asks_expert = loss.imitates or config.algorithm.off_policy.interventions
        self.corrector = Corrector(config.algorithm.dagger, pool) if asks_expert else None
        self.seconds = Seconds()
        self.stats = EpisodeStats()
        self.generators: list[torch.Generator] | None = None
        self._observation: Observation | None = None
        # Episodes in progress; all of them with auto-reset.
        self._active: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._output: PolicyOutput | None = None
        self._sent: dict[str, Tensor] = {}
        self._value_version = torch.zeros(0, dtype=torch.int64)
        self._steps: list[dict[str, Tensor]] = []
        self._inputs: list[dict[str, Tensor]] = []
        self._final_inputs: list[dict[str, Tensor]] = []
        self._labels: list[dict[str, Tensor]] = []
        self._blank: dict[str, Tensor] = {}  # inputs of one row, zeros
        self._seen: list[_Seen] = []
        self._since: NDArray[np.int64] = np.zeros(0, np.int64)  # the first chunk of the present episodes
        self._starts: dict[int, tuple[NDArray[np.uint8], NDArray[np.float32]]] = {}  # what they began with, by row

    def begin(
        self,
        seeds: NDArray[np.int64],
        tasks: NDArray[np.int32],
        generators: list[torch.Generator] | None = None,
    ) -> None:
        """Start fresh episodes.

        Args:
            seeds: ``int64[B]``.
            tasks: ``int32[B]``.
            generators: of the actions that are drawn, one a thread of the engine; None takes the engine's own.
        """
        clock = time.perf_counter()
        self.seconds, self.stats, self.generators = Seconds(), EpisodeStats.of(self.pool.spec.tasks), generators
        self._observation = self.pool.reset(seeds, tasks)
        self._active = np.ones(len(seeds), np.bool_)
        self._steps, self._inputs, self._final_inputs, self._labels = [], [], [], []
        self._seen, self._since = [], np.zeros(len(seeds), np.int64)
        if self.corrector is not None:
            self.corrector.begin(seeds)
        self._lap("env", clock)

    def branch(self, points: NDArray[np.int64], should_stop: Callable[[], bool]) -> int:
        """Let all environments of a group begin where its first one, the leader, is after some chunks; after ``begin``.

        Where the leader's episode ends before, they begin at its last chunk, or at the reset. Nothing of what led there
        is kept, but episodes' returns and lengths include it.

        Args:
            points: ``int64[B]``, how many chunks the leader plays, equal within a group.
            should_stop: asked before every chunk.

        Returns:
            Environment steps that were simulated.

        Raises:
            InterruptedError: ``should_stop`` answered True.
        """
        clock = time.perf_counter()
        assert self._observation is not None
        leader = np.arange(len(points)) // self.config.algorithm.group_size * self.config.algorithm.group_size
        running, played, num_steps = np.arange(len(points)) == leader, 0, 0
        actions = np.zeros((len(points), self.config.model.num_action_chunks, self.pool.spec.action_dim), np.float32)
        nothing = actions.copy()
        states = self.pool.get_row_states(np.flatnonzero(running).tolist())
        while (running := running & (points > played)).any():
            if should_stop():
                raise InterruptedError
            clock = self._lap("env", clock)
            observation = self._observation.select(np.flatnonzero(running))
            actions[running] = self.engine.act(observation, False, self.generators).actions
            clock = self._lap("policy", clock)
            step = self.pool.step(actions, running)
            self._observation, running = step.observation, running & ~step.done
            states |= self.pool.get_row_states(np.flatnonzero(running).tolist())
            played, num_steps = played + 1, num_steps + int(step.valid.sum())
        known = [row for row in range(len(points)) if leader[row] in states]
        self.pool.set_row_states({row: states[int(leader[row])] for row in known})
        # A step of no environment: what is seen from the restored states.
        self._observation = self.pool.step(nothing, np.zeros(len(points), np.bool_)).observation
        self._lap("env", clock)
        return num_steps

    def act(self) -> None:
        """Choose actions and send them; the policy sees only the environments whose episodes are in progress."""
        clock = time.perf_counter()
        assert self._observation is not None
        output = self._predict(self._observation)
        if self.corrector is not None:
            output, labels = self.corrector.correct(self._observation, output)
            # Beside critics only who acted is of use; pictures are in the policy's inputs.
            self._labels.append({"source": labels["source"]} if self.off_policy else labels)
        self._output = output
        self._sent = {
            "task_id": torch.from_numpy(self._observation.task_id.astype(np.int64)),
            "policy_version": torch.full((len(output.actions),), output.version, dtype=torch.int64),
        }
        clock = self._lap("policy", clock)
        self.pool.step_async(output.actions, self._active)
        self._lap("env", clock)

    def _predict(self, observation: Observation) -> PolicyOutput:
        going = np.flatnonzero(self._active)
        if len(going) == len(self._active):
            return self.engine.act(observation, self.needs_values, self.generators)
        if not len(going):
            assert self._output is not None
            return _spread(self._output, going, len(self._active), going)
        output = self.engine.act(observation.select(going), self.needs_values, self.generators)
        return _spread(output, np.arange(len(going)), len(self._active), going)

    def receive(self) -> None:
        """Wait for what the actions led to, and keep it."""
        clock = time.perf_counter()
        assert self._output is not None
        output = self._output
        step = self.pool.wait()
        clock = self._lap("env", clock)
        tasks = [self.pool.spec.tasks[task] for task in self._sent["task_id"].tolist()]
        self.stats.add(step, self._active, tasks)
        logprobs = output.logprobs.float().cpu()
        values = torch.zeros(len(logprobs), 1) if output.values is None else output.values.float().cpu()
        self._inputs.append({name: tensor.cpu() for name, tensor in output.forward_inputs.items()})
        self._steps.append(
            {
                "logprobs": logprobs,
                "values": values,
                "rewards": torch.from_numpy(step.reward.copy()),
                "valid": torch.from_numpy(step.valid.copy()),
                "terminated": torch.from_numpy(step.terminated.copy()),
                "truncated": torch.from_numpy(step.truncated.copy()),
                "bootstrap_values": self._bootstrap(step, values.shape[1]),
                "success": torch.from_numpy(step.success.copy()),
                **self._sent,
            }
        )
        self._steps[-1]["value_version"] = self._value_version
        if self.off_policy:
            self._keep_transition(output, step)
        if self.corrector is not None:
            self.corrector.after(step)
        if self.keep_frames:
            self._steps[-1]["frames"] = torch.from_numpy(self._after(step)[0][:, 0])
        if self.judge is not None and self._observation is not None:
            for row in np.flatnonzero(self._since == len(self._steps) - 1):
                self._starts[int(row)] = (self._observation.images[row].copy(), self._observation.state[row].copy())
            self._steps[-1]["call_id"] = torch.full((len(output.actions),), -1)
            self._seen.append(_Seen(*self._after(step), output.actions.copy(), self._observation.instruction))
            for row in np.flatnonzero(step.done):
                self._begin_call(int(row))
        if not self.auto_reset:
            self._active = self._active & ~step.done
        self._observation = step.observation
        self._lap("policy", clock)

    def _keep_transition(self, output: PolicyOutput, step: EnvStep) -> None:
        """Keep the actions, who chose them, and what was seen last where the step limit ended an episode."""
        chosen = output.forward_inputs.get(CHOSEN)
        self._steps[-1]["actions"] = torch.from_numpy(output.actions.copy()) if chosen is None else chosen.cpu()
        by_policy = torch.full((len(output.actions),), POLICY, dtype=torch.int8)
        self._steps[-1]["source"] = by_policy if self.corrector is None else self._labels[-1]["source"]
        rows = np.flatnonzero(step.final_mask & step.valid.any(axis=1))
        self._final_inputs.append(self._final(step.final_observation, rows))

    def _final(self, observation: Observation | None, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the policy's inputs ``[B,...]`` of an observation in ``rows``, zeros elsewhere."""
        assert self._observation is not None
        seen = self._observation if observation is None else observation
        if not self._blank:
            one = self.engine.inputs(seen.select(np.zeros(1, np.int64)))
            self._blank = {name: torch.zeros_like(tensor) for name, tensor in one.items()}
        whole = {name: blank.repeat(seen.batch_size, *[1] * (blank.ndim - 1)) for name, blank in self._blank.items()}
        if len(rows):  # of these alone: inputs may cost as much as acting
            for name, tensor in self.engine.inputs(seen.select(rows)).items():
                whole[name][torch.from_numpy(rows)] = tensor
        return whole

    def roll_out(self, shard: Shard, should_stop: Callable[[], bool]) -> TrajectoryBatch:
        """Return all chunks of a shard, with ``shard_meta``.

        Raises:
            InterruptedError: ``should_stop`` answered True; it is asked before every chunk.
        """
        self.begin(shard.seeds, shard.task_ids, self.engine.make_generators(shard.random))
        for _ in range(self.num_steps):
            if should_stop():
                raise InterruptedError
            self.act()
            self.receive()
        batch = self.stack(shard.group_id)
        batch.meta = dict(shard_meta(batch, self.stats, self.seconds))
        return batch

    def rebuild(self) -> None:
        """Rebuild the environments, so that nothing is left of their history."""
        self.pool.call("rebuild", restart=True)

    def abandon(self) -> None:
        """Wait for the chunk under way: a pool with a step under way takes no other request."""
        self.pool.wait()

    def _after(self, step: EnvStep) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return what is seen after the chunk, of the episode that it belongs to.

        Returns:
            images ``uint8[B,V,H,W,3]`` and states ``float32[B,S]``.
        """
        assert self._observation is not None
        images, states = step.observation.images.copy(), step.observation.state.copy()
        if self.auto_reset:  # where an episode has ended, that is the start of the next one
            images[step.done], states[step.done] = (
                self._observation.images[step.done],
                self._observation.state[step.done],
            )
        if step.final_observation is not None:
            images[step.final_mask] = step.final_observation.images[step.final_mask]
            states[step.final_mask] = step.final_observation.state[step.final_mask]
        return images, states

    def _begin_call(self, row: int) -> None:
        """Have the episode of an environment judged as far as it got; the next chunk begins another one."""
        assert self.judge is not None
        since, self._since[row] = int(self._since[row]), len(self._steps)
        chunks = [i for i in range(since, len(self._steps)) if bool(self._steps[i]["valid"][row].any())]
        if not chunks:
            return

        def of(name: str) -> Tensor:
            return torch.stack([self._steps[i][name][row] for i in chunks])

        valid, last, seen = of("valid"), chunks[-1], [self._seen[i] for i in chunks]
        images = torch.from_numpy(np.stack([each.images[row] for each in seen]))
        ended = (of("terminated") | of("truncated"))[-1] & valid[-1]
        self._steps[last]["call_id"][row] = self.judge(
            Episode(
                rewards=of("rewards")[valid],
                success=bool(self._steps[last]["success"][row]),
                finished=bool(ended.any()),
                task=self.pool.spec.tasks[int(self._steps[last]["task_id"][row])],
                frames=images[:, 0],
                policy_version=of("policy_version"),
                instruction=seen[-1].instruction[row],
                actions=torch.from_numpy(np.stack([each.actions[row] for each in seen]))[valid],
                states=torch.from_numpy(np.stack([each.states[row] for each in seen])),
                images=images,
                start_images=torch.from_numpy(self._starts[row][0]),
                start_state=torch.from_numpy(self._starts[row][1]),
            )
        )

    def _bootstrap(self, step: EnvStep, num_values: int) -> Tensor:
        """Return ``float32[B,K]``: the value of the last observation of episodes that the step limit ended, else 0."""
        values = torch.zeros(len(step.reward), num_values)
        self._value_version = torch.full((len(values),), NO_VERSION, dtype=torch.int64)
        rows = np.flatnonzero(step.final_mask & step.valid.any(axis=1))
        wanted = self.needs_values and self.config.algorithm.bootstrap_type == "truncation"
        if wanted and len(rows) and step.final_observation is not None:
            found, version = self._values(step.final_observation.select(rows))
            values[torch.from_numpy(rows)], self._value_version[torch.from_numpy(rows)] = found, version
        return values

    def _values(self, observation: Observation) -> tuple[Tensor, int]:
        """Return values ``float32[B,K]`` and the version of the weights that they are of, if it is known."""
        before = self.engine.version
        values = self.engine.values(observation)
        return values, before if self.engine.version == before else NO_VERSION

    def stack(self, group_id: Tensor) -> TrajectoryBatch:
        """Return what was gathered.

        Args:
            group_id: ``int64[B]``, equal where episodes began in the same initial state.
        """
        clock = time.perf_counter()
        assert self._observation is not None
        for row in range(len(self._since)) if self.judge is not None else ():
            self._begin_call(row)
        last = torch.zeros_like(self._steps[0]["values"])
        goes_on = ~(self._steps[-1]["terminated"] | self._steps[-1]["truncated"]).any(-1)
        self.stats.cut += int((goes_on.numpy() & self._active).sum())
        if self.needs_values:
            last, version = self._values(self._observation)
            self._steps[-1]["value_version"] = torch.where(goes_on, version, self._steps[-1]["value_version"])
        if self.off_policy:
            rows = goes_on.numpy().nonzero()[0]
            end = self._final(self._observation, rows)
            for name, tensor in self._final_inputs[-1].items():
                tensor[rows] = end[name][rows]
        columns: dict[str, Any] = {name: torch.stack([step[name] for step in self._steps]) for name in self._steps[0]}
        inputs = {name: torch.stack([step[name] for step in self._inputs]) for name in self._inputs[0]}
        columns["values"] = torch.cat([columns["values"], last[None]])
        if self.off_policy:
            finals = self._final_inputs
            columns["final_inputs"] = {name: torch.stack([step[name] for step in finals]) for name in finals[0]}
        columns["group_id"] = group_id.expand(columns["task_id"].shape)
        self._lap("policy", clock)
        batch = TrajectoryBatch.from_rollout(forward_inputs=inputs, **columns)
        if self.corrector is not None and not self.off_policy:
            batch["expert"] = {name: torch.stack([step[name] for step in self._labels]) for name in self._labels[0]}
        return batch

    def _lap(self, name: str, clock: float) -> float:
        now = time.perf_counter()
        setattr(self.seconds, name, getattr(self.seconds, name) + now - clock)
        record("wait for simulators" if name == "env" else name, clock, now)
        return now


def _spread(output: PolicyOutput, rows: NDArray[np.int64], batch: int, places: NDArray[np.int64]) -> PolicyOutput:
    """Return an output for ``batch`` environments: the given rows at their places, zeros elsewhere."""
    source, target = torch.from_numpy(rows), torch.from_numpy(places)

    def spread(x: Tensor) -> Tensor:
        whole = x.new_zeros((batch, *x.shape[1:]))
        whole[target] = x[source.to(x.device)]
        return whole

    actions = np.zeros((batch, *output.actions.shape[1:]), output.actions.dtype)
    actions[places] = output.actions[rows]
    return replace(
        output,
        actions=actions,
        logprobs=spread(output.logprobs),
        values=None if output.values is None else spread(output.values),
        forward_inputs={name: spread(tensor) for name, tensor in output.forward_inputs.items()},
    )
