"""Where the learning signal of a rollout is lost: ``learning_signal.py [--json FILE] [OVERRIDES ...]``.

From each of S states in the midst of episodes, K chunks are drawn by the policy as it acts in training, and each is
continued M times to the end of its episode, from the exact state. Measured are

* which part of the variance of what follows (the sum of rewards to the end of the episode, and whether it succeeds)
  lies between states, between the chunks of a state, and in what comes after a chunk: only the second is what a policy
  can learn from;
* how much of the second is a linear function of the actions, of their mean over the chunk and of all of them;
* which part of a minibatch's gradient, ``|E g|^2 / E|g|^2``, is signal: with the advantages of ordinary rollouts, and
  with those of the chunks above, whose baseline is what the other chunks of the same state led to.

The critic is warmed up first, as configured; the policy stays as it is. The gradient is that of the configured loss
without entropy, reference and critic.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hardware import describe_hardware
from nested_variance import LEVELS, Floats, components, explained, gradient_signal, share_intervals
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from embodrl.algorithms.advantages import Advantages, compute_advantages
from embodrl.algorithms.decoupled import STALENESS, proximal_columns
from embodrl.config import LoadedConfig
from embodrl.config.schema import AlgorithmConfig, Config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import UsageError
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.rollout.native import concat_outputs, make_rollout_engine
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.learners.objective import (
    chunk_weights,
    counts_of,
    flatten_chunks,
    make_loss,
    trained_chunks,
)
from embodrl.learners.on_policy import OnPolicyUpdate
from embodrl.pipelines.load import load_config
from embodrl.specs import LOSSES
from embodrl.storage.json_file import write_json_file
from embodrl.types import EnvStep, Observation, PolicyOutput
from embodrl.workers.collector import SyncCollector
from embodrl.workers.env import check_simulator, make_pool
from embodrl.workers.policy import build_policy, configure_torch, num_threads


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        states, chunks, repeats: S, K and M.
        rollouts: ordinary rollouts whose gradients are measured.
        groups: into which the chunks of either kind are divided, each with a gradient of its own.
    """

    states: int = 64
    chunks: int = 16
    repeats: int = 2
    rollouts: int = 1
    groups: int = 16


@dataclass(frozen=True)
class State:
    """A moment of an episode: what ``VectorEnv.get_row_state`` returned, and what is seen, a batch of one."""

    simulator: object
    observation: Observation


@dataclass
class Outcomes:
    """What chunks led to.

    Attributes:
        returns: ``float64[S,K,M]``, sum of the rewards from the state to the end of the episode.
        success: ``float64[S,K,M]``, 0 or 1.
        valid: ``bool[S,K,C]``, actions of the chunk that were executed.
        env_steps: simulated.
        differences: repeats of a chunk that led to another reward or observation than the first: 0 if states are exact.
    """

    returns: Floats
    success: Floats
    valid: NDArray[np.bool_]
    env_steps: int = 0
    differences: int = 0


class Branches:
    """Episodes that continue from saved states.

    Args:
        pool: started, and left without auto-reset.
        engine: the policy.
    """

    def __init__(self, pool: EnvPool, engine: RolloutEngine) -> None:
        self.pool, self.engine = pool, engine
        self.size = pool.spec.num_envs
        pool.call("set_auto_reset", {"value": False})

    def _place(self, row: int) -> tuple[int, int]:
        return divmod(row, self.size // len(self.pool.managers))

    def draw_states(self, count: int, num_chunks: int, rng: np.random.Generator) -> list[State]:
        """Return states after 0 to ``num_chunks`` - 1 chunks, equally likely, of episodes that continue there."""
        found: list[State] = []
        while len(found) < count:
            seeds = rng.integers(2**31, size=self.size)
            tasks = rng.integers(len(self.pool.spec.tasks), size=self.size).astype(np.int32)
            wanted, running = rng.integers(num_chunks, size=self.size), np.ones(self.size, np.bool_)
            self.pool.call("rebuild")  # a state that is restored by replay then has one episode to replay
            observation = self.pool.reset(seeds, tasks, copy=True)
            for played in range(num_chunks):
                found += [self._save(row, observation) for row in np.flatnonzero(running & (wanted == played)).tolist()]
                running &= wanted > played
                if not running.any():
                    break
                step = self.pool.step(self.engine.act(observation, False).actions, running, copy=True)
                observation, running = step.observation, running & ~step.done
        return [found[i] for i in rng.choice(len(found), count, replace=False)]

    def _save(self, row: int, observation: Observation) -> State:
        rank, place = self._place(row)
        return State(self.pool.call_one(rank, "get_row_state", {"row": place}), observation.select(np.array([row])))

    def draw_chunks(self, states: list[State], count: int, compute_values: bool) -> PolicyOutput:
        """Return ``count`` chunks of each state, ``[S*K]`` rows."""
        seen = [Observation.concat([state.observation] * count) for state in states]
        return concat_outputs([self.engine.act(each, compute_values) for each in seen])

    def play(self, states: list[State], chunks: NDArray[np.float32], repeats: int) -> Outcomes:
        """Execute each of the chunks ``float32[S,K,C,A]`` and continue to the end of the episode, ``repeats`` times.

        Episodes that a fault of the simulator ends are played again.
        """
        shape = (*chunks.shape[:2], repeats)
        outcomes = Outcomes(np.zeros(shape), np.zeros(shape), np.zeros(chunks.shape[:3], np.bool_))
        waiting = deque(np.ndindex(shape))
        playing: dict[int, tuple[int, ...]] = {}
        seen: dict[int, Observation] = {}
        after: dict[tuple[int, ...], tuple[bytes, ...]] = {}
        while waiting or playing:
            starting: list[int] = []
            for row in range(self.size):
                if row not in playing and waiting:
                    playing[row] = waiting.popleft()
                    state = states[playing[row][0]]
                    rank, place = self._place(row)
                    self.pool.call_one(rank, "set_row_state", {"row": place, "state": state.simulator})
                    seen[row], outcomes.returns[playing[row]] = state.observation, 0.0
                    starting.append(row)
            step = self.pool.step(self._actions(playing, starting, seen, chunks), self._mask(playing), copy=True)
            outcomes.env_steps += int(step.valid.sum())
            for row, job in list(playing.items()):
                if step.done[row] and not step.valid[row].any():
                    waiting.append(playing.pop(row))
                    continue
                outcomes.returns[job] += float(step.reward[row].sum())
                outcomes.success[job] = float(step.success[row])
                if row in starting:
                    outcomes.valid[job[:2]] = step.valid[row]
                    known = after.setdefault(job[:2], _fingerprint(step, row))
                    outcomes.differences += known != _fingerprint(step, row)
                if step.done[row]:
                    del playing[row]
                seen[row] = step.observation.select(np.array([row]))
        return outcomes

    def _actions(
        self,
        playing: dict[int, tuple[int, ...]],
        starting: list[int],
        seen: dict[int, Observation],
        chunks: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        actions = np.zeros((self.size, *chunks.shape[2:]), np.float32)
        for row in starting:
            actions[row] = chunks[playing[row][:2]]
        continuing = [row for row in playing if row not in starting]
        if continuing:
            actions[continuing] = self.engine.act(Observation.concat([seen[row] for row in continuing]), False).actions
        return actions

    def _mask(self, playing: dict[int, tuple[int, ...]]) -> NDArray[np.bool_]:
        mask = np.zeros(self.size, np.bool_)
        mask[list(playing)] = True
        return mask


def _fingerprint(step: EnvStep, row: int) -> tuple[bytes, ...]:
    """Return what a chunk led to, but for the observation of an episode that has ended, which is undefined."""
    parts = [step.reward[row], step.valid[row], step.episode_return[row]]
    if not step.done[row]:
        parts += [step.observation.images[row], step.observation.state[row]]
    return tuple(part.tobytes() for part in parts)


def branch_advantages(outcomes: Floats) -> Floats:
    """Return ``float64[S,K]`` of ``[S,K,M]``: the mean outcome of a chunk less that of the others of its state."""
    means = outcomes.mean(2)
    others = (means.sum(1, keepdims=True) - means) / (means.shape[1] - 1)
    return means - others


class Gradients:
    """Gradients of the policy's loss on groups of chunks.

    Args:
        engine: the policy.
        algorithm: the loss; of it only what raises or lowers the probability of actions counts.
    """

    def __init__(self, engine: NativeTrainEngine, algorithm: AlgorithmConfig) -> None:
        self.engine = engine
        self.algorithm = algorithm.model_copy(
            update={
                "entropy_bonus": 0.0,
                "value_loss_coef": 0.0,
                "kl": algorithm.kl.model_copy(update={"coef": 0.0}),
                "update_epoch": 1,
            }
        )
        self.loss = make_loss(engine.evaluate, self.algorithm, LOSSES.entry(algorithm.loss_type))

    def signal(self, batch: TrajectoryBatch, advantages: Advantages, units: Tensor, groups: int, minibatch: int) -> Any:
        """Return the figures of a rollout.

        Args:
            batch: ``[T,B]``, of the present policy.
            advantages: of it.
            units: ``int64[B]``, in order; rows of a unit stay in one group, as their outcomes depend on each other.
            groups: how many.
            minibatch: chunks of one update, for the share of signal in it.

        Raises:
            UsageError: there are fewer than four groups, or too few units for them.
        """
        known = units.unique()
        if not 4 <= groups <= len(known):
            raise UsageError(
                f"{groups} groups of {len(known)} independent parts",
                "choose --groups of at least 4, and more states or env.train.total_num_envs",
                code="signal-groups",
            )
        aged = torch.zeros_like(batch.policy_version)
        batch = batch.replace(**{STALENESS: aged}, **proximal_columns(batch, self.algorithm, aged))
        trained = trained_chunks(batch, advantages, self.algorithm.chunk_fraction)
        gradients: list[Tensor] = []
        for part in known.tensor_split(groups):
            rows = torch.isin(units, part).nonzero().squeeze(-1)
            mine, chosen = batch[rows.tolist()], trained[:, rows]
            estimate = Advantages(*(x[:, rows] for x in vars(advantages).values()))
            weights = chunk_weights(mine, chosen, self.algorithm)
            gradients.append(self._gradient(flatten_chunks(mine, estimate, chosen, weights)))
        stacked = torch.stack(gradients)
        found = gradient_signal((stacked @ stacked.T).double().numpy())
        num_chunks = int(trained.sum())
        share, error = found.share(minibatch / (num_chunks / groups))
        return {
            "chunks": num_chunks,
            "groups": groups,
            **asdict(found),
            "minibatch": minibatch,
            "minibatch_share_percent": share,
            "minibatch_share_standard_error": error,
        }

    def _gradient(self, chunks: TrajectoryBatch) -> Tensor:
        engine = self.engine
        for parameter in engine.state.policy_parameters:  # a warm-up of the critic leaves them without gradients
            parameter.requires_grad_(True)
        counts = counts_of(chunks, self.algorithm, engine.device)
        engine.forward_backward(chunks, lambda micro: self.loss(counts, micro))
        leaves = [engine.state.leaves[parameter] for parameter in engine.state.policy_parameters]
        flat = torch.cat([(torch.zeros_like(x) if x.grad is None else x.grad).flatten().float().cpu() for x in leaves])
        engine.state.clear_gradients()
        return flat


def branch_batch(
    output: PolicyOutput, outcomes: Outcomes, advantages: Floats, version: int
) -> tuple[TrajectoryBatch, Advantages]:
    """Return the chunks as a rollout of one step, ``[1,S*K]``, and their advantages at unit variance."""
    count = len(output.actions)
    valid = torch.from_numpy(outcomes.valid.reshape(1, count, -1))
    values = output.values if output.values is not None else torch.zeros(count, 1)
    values = values.float().cpu()[None]
    nothing = torch.zeros(1, count, dtype=torch.int64)
    batch = TrajectoryBatch.from_rollout(
        forward_inputs={name: tensor[None] for name, tensor in output.forward_inputs.items()},
        logprobs=output.logprobs.float().cpu()[None],
        values=torch.cat([values, values]),
        rewards=torch.zeros(valid.shape),
        valid=valid,
        terminated=torch.zeros_like(valid),
        truncated=torch.zeros_like(valid),
        bootstrap_values=torch.zeros_like(values),
        policy_version=nothing + version,
        task_id=nothing,
    )
    scaled = torch.from_numpy(advantages / max(float(advantages.std()), 1e-6)).float().view(1, count, 1)
    counted = valid.any(-1, keepdim=True) if values.shape[-1] == 1 else valid
    column = torch.where(counted, scaled, 0.0)
    return batch, Advantages(column, torch.zeros_like(column), counted)


def describe(outcomes: Floats, actions: NDArray[np.float32], seed: int) -> dict[str, Any]:
    """Return where the variance of outcomes ``[S,K,M]`` lies, and what actions ``[S,K,C,A]`` explain of it."""
    rng = np.random.default_rng(seed)
    found = components(outcomes)
    intervals = share_intervals(outcomes, rng)
    chosen = actions.astype(np.float64)
    sides = {"chunk_mean": chosen.mean(2), "all_actions": chosen.reshape(*chosen.shape[:2], -1)}
    return {
        "mean": float(outcomes.mean()),
        "variance": float(found.variances.sum()),
        "shares_percent": dict(zip(LEVELS, found.shares.tolist(), strict=True)),
        "shares_95_percent": dict(zip(LEVELS, intervals.tolist(), strict=True)),
        "linear": {name: asdict(explained(outcomes, features, rng)) for name, features in sides.items()},
    }


def rollouts(
    config: Config, pool: EnvPool, acting: RolloutEngine, engine: NativeTrainEngine, count: int
) -> tuple[TrajectoryBatch, Advantages]:
    """Warm the critic up as configured, then return ``count`` rollouts side by side, and their advantages."""
    collector = SyncCollector(config, pool, acting, lambda: False)
    needs_values = LOSSES.entry(config.algorithm.loss_type).needs_values
    warm_up = config.actor.optim.critic_warmup_iterations if needs_values else 0
    shuffle = torch.Generator().manual_seed(config.runner.seed)
    batches: list[TrajectoryBatch] = []
    estimates: list[Advantages] = []
    for iteration in range(warm_up + count):
        batch, _ = collector.gather(iteration)
        estimate = compute_advantages(batch, config.algorithm)
        if iteration < warm_up:
            OnPolicyUpdate(engine, config).update(batch, estimate, shuffle)
        else:
            batches.append(batch)
            estimates.append(estimate)
        collector.update_weights(engine.weights(), engine.version)
    for batch in batches:
        batch.meta = {}
    columns = zip(*(vars(estimate).values() for estimate in estimates), strict=True)
    return TrajectoryBatch.concat(batches), Advantages(*(torch.cat(parts, 1) for parts in columns))


def measure(loaded: LoadedConfig, size: Size) -> dict[str, Any]:
    """Return the figures of a run's policy.

    Raises:
        UsageError: the loss is not on-policy, or there is too little to measure.
    """
    config = loaded.config
    if LOSSES.entry(config.algorithm.loss_type).learns_from_records:
        raise UsageError(
            f"algorithm.loss_type={config.algorithm.loss_type} does not train on rollouts of the present policy",
            "choose an on-policy algorithm, e.g. algorithm=ppo",
            code="signal-off-policy",
        )
    numbers = config.model.num_action_chunks * config.model.action_dim
    if min(size.states, size.chunks, size.repeats) < 2 or size.states * (size.chunks - 1) <= numbers:
        raise UsageError(
            f"{size.states} states with {size.chunks} chunks each, continued {size.repeats} times, for the {numbers}"
            " numbers of an action chunk",
            "choose at least 2 of each, and --states x (--chunks - 1) above these numbers",
            code="signal-size",
        )
    device = configure_torch(config, loaded.deployment.of("rollout")[0])
    start = time.perf_counter()
    with make_pool(config, config.env.train.total_num_envs) as pool:
        policy, threads = build_policy(config), num_threads(config)
        engine = NativeTrainEngine(policy, EngineOptions.of(config), device, threads)
        acting = make_rollout_engine(config, policy, threads)
        gradients = Gradients(engine, config.algorithm)
        minibatch = config.actor.global_batch_size
        batch, estimate = rollouts(config, pool, acting, engine, size.rollouts)
        units = torch.arange(len(batch)) // config.algorithm.group_size
        ordinary = gradients.signal(batch, estimate, units, size.groups, minibatch)

        branches = Branches(pool, acting)
        rng = np.random.default_rng(config.runner.seed)
        num_chunks = -(-config.env.max_episode_steps // config.model.num_action_chunks)
        states = branches.draw_states(size.states, num_chunks, rng)
        drawn = branches.draw_chunks(states, size.chunks, LOSSES.entry(config.algorithm.loss_type).needs_values)
        actions = drawn.actions.reshape(size.states, size.chunks, *drawn.actions.shape[1:])
        outcomes = branches.play(states, actions, size.repeats)
    units = torch.arange(size.states).repeat_interleave(size.chunks)
    branched: dict[str, Any] = {}
    for name, values in (("return", outcomes.returns), ("success", outcomes.success)):
        rows, advantages = branch_batch(drawn, outcomes, branch_advantages(values), engine.version)
        branched[name] = gradients.signal(rows, advantages, units, min(size.groups, size.states), minibatch)
    return {
        "size": asdict(size),
        "env_steps": {"rollouts": int(batch.valid.sum()), "branches": outcomes.env_steps},
        "differences": outcomes.differences,
        "outcomes": {
            "return": describe(outcomes.returns, actions, config.runner.seed),
            "success": describe(outcomes.success, actions, config.runner.seed),
        },
        "gradient": {"rollout": ordinary, **{f"branches, {name}": figures for name, figures in branched.items()}},
        "wall_s": round(time.perf_counter() - start, 1),
        "seed": config.runner.seed,
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """Return what was found, for people."""
    variance = Table("outcome", "mean", "variance", *(f"{level}, %" for level in LEVELS), title="where it varies")
    linear = Table(
        "outcome", "features", "directions", "adjusted R2", "by chance", "of chunks, %", title="linear in the actions"
    )
    for name, found in result["outcomes"].items():
        cells: list[str] = []
        for level in LEVELS:
            low, high = found["shares_95_percent"][level]
            cells.append(f"{found['shares_percent'][level]:.1f} ({low:.1f} to {high:.1f})")
        variance.add_row(name, f"{found['mean']:.3f}", f"{found['variance']:.4f}", *cells)
        for features, fit in found["linear"].items():
            part = "" if fit["of_chunks"] is None else f"{fit['of_chunks']:.0f}"
            figures = (f"{fit[key]:.3f}" for key in ("adjusted_r2", "chance_r2"))
            linear.add_row(name, features, str(fit["directions"]), *figures, part)
    gradient = Table("advantages", "chunks", "|g|^2 of a group", "|E g|^2", "of a minibatch, %", title="gradient")
    for name, found in result["gradient"].items():
        mean = f"{found['squared_mean']:.3g} +- {found['standard_error']:.2g}"
        share = f"{found['minibatch_share_percent']:.1f} +- {found['minibatch_share_standard_error']:.1f}"
        gradient.add_row(name, str(found["chunks"]), f"{found['squared_norm']:.3g}", mean, share)
    return [variance, linear, gradient]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print tables, write the figures; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="as of `embodrl train`")
    options = vars(parser.parse_args(arguments))
    path, overrides = options.pop("json"), options.pop("overrides")
    loaded = load_config(["env.video.enabled=false", *overrides])
    check_simulator(loaded.config)
    result = {"overrides": overrides, **measure(loaded, replace(Size(), **options)), "hardware": describe_hardware()}
    console = Console()
    for table in tables(result):
        console.print(table)
    console.print(f"repeats of a chunk that differ from the first: {result['differences']}; {result['wall_s']} s")
    if path is not None:
        write_json_file(path, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
