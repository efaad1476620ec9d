"""Recorders of training: columns of a ``TrajectoryBatch``, and episodes to judge.

Shapes: T policy steps (chunks), B environments, K values per chunk, C actions in a chunk, A action dimensions, V
cameras, H x W image, S state dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.data.replay import POLICY
from embodrl.envs.pool.pool import EnvPool
from embodrl.envs.real_time.devices import open_device
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.specs import LOSSES
from embodrl.types import CHOSEN, Observation, PolicyOutput
from embodrl.workers.corrector import Corrector, ExpertCorrector, PersonCorrector
from embodrl.workers.episode import JUDGED, Episode, episode_of
from embodrl.workers.experts import ScriptedExperts, load_experts
from embodrl.workers.play import PlayedChunk, Recorder

NO_VERSION = -1
"""Version of values that are zeros, or may come from several versions of the weights."""

Judge = Callable[[Episode], int]
"""Receives an episode as far as it got, and returns a ``call_id``."""


@dataclass(frozen=True)
class Judging:
    """Requirements of rewards on rollouts; ``judge`` gets every ended episode, None defers all to the rollout's end."""

    keep_frames: bool = False
    judge: Judge | None = None


NOT_JUDGED = Judging()


def make_recorders(config: Config, pool: EnvPool, engine: RolloutEngine, judging: Judging) -> list[Recorder]:
    """Return the recorders that the algorithm and the rewards of a run need."""
    loss = LOSSES.entry(config.algorithm.loss_type)
    auto_reset = config.env.train.auto_reset
    transitions = TransitionRecorder()
    off_policy = loss.off_policy and not loss.imitates
    asks_expert = loss.imitates or config.algorithm.off_policy.interventions
    # First, because the judge reads what it kept of the same chunk.
    recorders: list[Recorder] = [transitions]
    if loss.needs_values:
        recorders.append(ValueRecorder(engine, config.algorithm.bootstrap_type == "truncation"))
    else:
        recorders.append(NoValues())
    if off_policy:
        recorders.append(FinalRecorder(engine))
    if asks_expert:
        corrector = make_corrector(config, pool)
        recorders.append(SourceRecorder(corrector) if off_policy else LabelRecorder(corrector))
    if judging.keep_frames:
        recorders.append(FrameRecorder(auto_reset))
    if judging.judge is not None:
        recorders.append(JudgeRecorder(judging.judge, transitions, pool, auto_reset))
    return recorders


def make_corrector(config: Config, pool: EnvPool) -> Corrector:
    """Return the corrector that may act in place of the policy.

    Raises:
        MissingDependencyError: the device's package is not installed.
        UsageError: the device is not connected.
        CheckpointError: the policy that is to be the expert does not fit.
    """
    device = config.algorithm.off_policy.intervention_device
    if device is None or not config.algorithm.off_policy.interventions:
        experts = ScriptedExperts(pool) if config.algorithm.dagger.expert is None else load_experts(config)
        return ExpertCorrector(config.algorithm.dagger, experts, pool.spec.num_envs)
    return PersonCorrector(open_device(device, pool.spec.action_dim, config.env.real_time.control_dir))


def _stacked(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}


class TransitionRecorder(Recorder):
    """Keeps the data that every algorithm learns from, as columns ``[B,...]`` of each chunk."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self._inputs: list[dict[str, Tensor]] = []

    def begin(self, seeds: NDArray[np.int64], observation: Observation) -> None:
        self.steps = []
        self._inputs = []

    def after(self, chunk: PlayedChunk) -> None:
        output = chunk.output
        step = chunk.step
        self._inputs.append({name: tensor.cpu() for name, tensor in output.forward_inputs.items()})
        self.steps.append(
            {
                # float32: ratios are exponentials of log-prob differences, which bfloat16 would round away.
                "logprobs": output.logprobs.float().cpu(),
                # Copies: the pool reuses this memory after the next chunk.
                "rewards": torch.from_numpy(step.reward.copy()),
                "valid": torch.from_numpy(step.valid.copy()),
                "terminated": torch.from_numpy(step.terminated.copy()),
                "truncated": torch.from_numpy(step.truncated.copy()),
                "success": torch.from_numpy(step.success.copy()),
                "task_id": torch.from_numpy(chunk.task_id),
                "policy_version": torch.full((len(output.actions),), output.version, dtype=torch.int64),
            }
        )

    def columns(self) -> dict[str, Any]:
        return {**_stacked(self.steps), "forward_inputs": _stacked(self._inputs)}


class NoValues(Recorder):
    """Fills a critic's columns with zeros, for algorithms without one."""

    def begin(self, seeds: NDArray[np.int64], observation: Observation) -> None:
        self._shape = (0, len(seeds))

    def end(self, last: PlayedChunk) -> None:
        self._shape = (last.number + 1, len(last.active))

    def columns(self) -> dict[str, Any]:
        num_steps, num_envs = self._shape
        return {
            "values": torch.zeros(num_steps + 1, num_envs, 1),
            "bootstrap_values": torch.zeros(num_steps, num_envs, 1),
            "value_version": torch.full((num_steps, num_envs), NO_VERSION, dtype=torch.int64),
        }


class ValueRecorder(Recorder):
    """Keeps the critic's values, with ``bootstrap`` also of last observations where the step limit ended an episode."""

    def __init__(self, engine: RolloutEngine, bootstrap: bool) -> None:
        self.engine = engine
        self.bootstrap = bootstrap
        self._steps: list[dict[str, Tensor]] = []
        self._last = torch.zeros(0)

    def begin(self, seeds: NDArray[np.int64], observation: Observation) -> None:
        self._steps = []

    def after(self, chunk: PlayedChunk) -> None:
        assert chunk.output.values is not None
        values = chunk.output.values.float().cpu()
        bootstrap = torch.zeros_like(values)
        version = torch.full((len(values),), NO_VERSION, dtype=torch.int64)
        final = chunk.step.final_observation
        rows = chunk.cut_off
        if self.bootstrap and len(rows) and final is not None:
            places = torch.from_numpy(rows)
            bootstrap[places], version[places] = self._values(final.select(rows))
        self._steps.append({"values": values, "bootstrap_values": bootstrap, "value_version": version})

    def end(self, last: PlayedChunk) -> None:
        self._last, version = self._values(last.step.observation)
        # An ended episode is bootstrapped from its own final observation, so its version stays.
        goes_on = torch.from_numpy(~last.step.done)
        self._steps[-1]["value_version"] = torch.where(goes_on, version, self._steps[-1]["value_version"])

    def columns(self) -> dict[str, Any]:
        columns = _stacked(self._steps)
        # T + 1 rows: the last one bootstraps the episodes that continue after the rollout.
        return {**columns, "values": torch.cat([columns["values"], self._last[None]])}

    def _values(self, observation: Observation) -> tuple[Tensor, int]:
        """Return values ``float32[B,K]`` and the version of their weights, if known."""
        # In an asynchronous run the weights may be swapped in the meantime.
        before = self.engine.version
        values = self.engine.values(observation)
        return values, before if self.engine.version == before else NO_VERSION


class FinalRecorder(Recorder):
    """Also keeps what off-policy algorithms need: the actions, and the policy's inputs at the end of episodes."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._actions: list[Tensor] = []
        self._inputs: list[dict[str, Tensor]] = []
        self._blank: dict[str, Tensor] = {}  # zero inputs of one row

    def begin(self, seeds: NDArray[np.int64], observation: Observation) -> None:
        self._actions = []
        self._inputs = []

    def after(self, chunk: PlayedChunk) -> None:
        chosen = chunk.output.forward_inputs.get(CHOSEN)
        self._actions.append(torch.from_numpy(chunk.output.actions.copy()) if chosen is None else chosen.cpu())
        final = chunk.step.final_observation
        # Without final observations no row was truncated, and any observation provides the shapes.
        self._inputs.append(self._final(chunk.seen if final is None else final, chunk.cut_off))

    def end(self, last: PlayedChunk) -> None:
        # The next observation of a continuing episode would be beyond the last row, so it is kept as a final one.
        rows = np.flatnonzero(~last.step.done)
        end = self._final(last.step.observation, rows)
        for name, tensor in self._inputs[-1].items():
            tensor[rows] = end[name][rows]

    def columns(self) -> dict[str, Any]:
        actions = torch.stack(self._actions)
        by_policy = torch.full(actions.shape[:2], POLICY, dtype=torch.int8)
        return {"actions": actions, "source": by_policy, "final_inputs": _stacked(self._inputs)}

    def _final(self, seen: Observation, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the policy's inputs ``[B,...]`` of an observation in ``rows``, zeros elsewhere."""
        if not self._blank:
            one = self.engine.inputs(seen.select(np.zeros(1, np.int64)))
            self._blank = {name: torch.zeros_like(tensor) for name, tensor in one.items()}
        whole = {name: blank.repeat(seen.batch_size, *[1] * (blank.ndim - 1)) for name, blank in self._blank.items()}
        if len(rows):  # only these rows: computing inputs may cost as much as acting
            for name, tensor in self.engine.inputs(seen.select(rows)).items():
                whole[name][torch.from_numpy(rows)] = tensor
        return whole


class LabelRecorder(Recorder):
    """Has experts label observations and act in the policy's place; keeps the labels as the group ``expert``."""

    def __init__(self, corrector: Corrector) -> None:
        self.corrector = corrector
        self._labels: list[dict[str, Tensor]] = []

    def begin(self, seeds: NDArray[np.int64], observation: Observation) -> None:
        self._labels = []
        self.corrector.begin(seeds)

    def before(self, observation: Observation, output: PolicyOutput) -> PolicyOutput:
        output, labels = self.corrector.correct(observation, output)
        self._labels.append(self.kept(labels))
        return output

    def kept(self, labels: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a step's columns to keep."""
        return labels

    def after(self, chunk: PlayedChunk) -> None:
        self.corrector.after(chunk.step)

    def columns(self) -> dict[str, Any]:
        return {"expert": _stacked(self._labels)}

    def release(self) -> None:
        self.corrector.close()


class SourceRecorder(LabelRecorder):
    """Like LabelRecorder, for critics: keeps only who acted, since images are in the policy's inputs."""

    def kept(self, labels: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"source": labels["source"]}

    def columns(self) -> dict[str, Any]:
        return _stacked(self._labels)


def seen_after(chunk: PlayedChunk, auto_reset: bool) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return the observation after a chunk, of its own episode: ``uint8[B,V,H,W,3]`` and ``float32[B,S]``.

    With ``auto_reset``, ``chunk.step`` holds the next episode's first observation where one has ended.
    """
    step = chunk.step
    before = chunk.seen
    images = step.observation.images.copy()
    states = step.observation.state.copy()
    if auto_reset:
        images[step.done] = before.images[step.done]
        states[step.done] = before.state[step.done]
    if step.final_observation is not None:
        images[step.final_mask] = step.final_observation.images[step.final_mask]
        states[step.final_mask] = step.final_observation.state[step.final_mask]
    return images, states


class FrameRecorder(Recorder):
    """Keeps the first camera's image after each chunk; ``auto_reset`` as in ``seen_after``."""

    def __init__(self, auto_reset: bool) -> None:
        self.auto_reset = auto_reset
        self._frames: list[Tensor] = []

    def begin(self, seeds: NDArray[np.int64], observation: Observation) -> None:
        self._frames = []

    def after(self, chunk: PlayedChunk) -> None:
        self._frames.append(torch.from_numpy(seen_after(chunk, self.auto_reset)[0][:, 0]))

    def columns(self) -> dict[str, Any]:
        return {"frames": torch.stack(self._frames)}


@dataclass(frozen=True)
class _Seen:
    """A chunk's results that are not in the batch columns; for images and states see ``seen_after``.

    ``actions`` are ``float32[B,C,A]``.
    """

    images: NDArray[np.uint8]
    states: NDArray[np.float32]
    actions: NDArray[np.float32]
    instruction: list[str]


class JudgeRecorder(Recorder):
    """Has every episode judged when it ends, and running episodes at the end of the rollout.

    ``transitions``, called before, records the other columns; for ``auto_reset`` see ``seen_after``.
    """

    def __init__(self, judge: Judge, transitions: TransitionRecorder, pool: EnvPool, auto_reset: bool) -> None:
        self.judge = judge
        self.transitions = transitions
        self.pool = pool
        self.auto_reset = auto_reset
        self._seen: list[_Seen] = []
        self._call_ids: list[Tensor] = []
        self._since: NDArray[np.int64] = np.zeros(0, np.int64)  # first chunk of the current episodes
        self._starts: dict[
            int, tuple[NDArray[np.uint8], NDArray[np.float32]]
        ] = {}  # their initial observations, by row

    def begin(self, seeds: NDArray[np.int64], observation: Observation) -> None:
        self._seen = []
        self._call_ids = []
        self._since = np.zeros(len(seeds), np.int64)

    def after(self, chunk: PlayedChunk) -> None:
        for row in np.flatnonzero(self._since == chunk.number):
            # Copies: the pool reuses this memory after the next chunk, and episodes last longer.
            self._starts[int(row)] = (chunk.seen.images[row].copy(), chunk.seen.state[row].copy())
        self._call_ids.append(torch.full((len(chunk.active),), -1))
        after = seen_after(chunk, self.auto_reset)
        self._seen.append(_Seen(*after, chunk.output.actions.copy(), chunk.seen.instruction))
        for row in np.flatnonzero(chunk.step.done):
            self._begin_call(int(row))

    def end(self, last: PlayedChunk) -> None:
        for row in range(len(self._since)):
            self._begin_call(row)

    def columns(self) -> dict[str, Any]:
        return {"call_id": torch.stack(self._call_ids)}

    def _begin_call(self, row: int) -> None:
        """Start judging an environment's episode as far as it got; the next chunk begins another episode."""
        steps = self.transitions.steps
        since = int(self._since[row])
        self._since[row] = len(steps)
        # A chunk without valid actions belongs to an episode that a fault ended.
        chunks = [i for i in range(since, len(steps)) if bool(steps[i]["valid"][row].any())]
        if not chunks:
            return

        def of(name: str) -> Tensor:
            return torch.stack([steps[i][name][row] for i in chunks])

        last = chunks[-1]
        seen = [self._seen[i] for i in chunks]
        images = torch.from_numpy(np.stack([each.images[row] for each in seen]))
        columns = {name: images[:, 0] if name == "frames" else of(name) for name in JUDGED}
        task = self.pool.spec.tasks[int(steps[last]["task_id"][row])]
        self._call_ids[last][row] = self.judge(
            replace(
                episode_of(columns, task),
                instruction=seen[-1].instruction[row],
                actions=torch.from_numpy(np.stack([each.actions[row] for each in seen]))[columns["valid"]],
                states=torch.from_numpy(np.stack([each.states[row] for each in seen])),
                images=images,
                start_images=torch.from_numpy(self._starts[row][0]),
                start_state=torch.from_numpy(self._starts[row][1]),
            )
        )
