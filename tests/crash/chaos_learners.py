"""What `make chaos` trains: every learner at its smallest size, its undisturbed result, and the comparison with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fork_server import ForkServer
from runs import LEARNING_OPENVLA, TINY, environment
from scenarios import Result, digest, rows

INPUT_TIMEOUT_S = 240.0
RESTARTS = ("env/restarts", "rollout/restarts")
"""Columns that count what was restarted in place: they differ where nothing else does."""
PLAIN = TINY.replace("extensions: [stop_at]", "")
MLP = """
presets: {env: toy, model: mlp, algorithm: sac}
env:
  state: full
  pin_cpus: false
  cameras: [{height: 16, width: 16}]
  train: {total_num_envs: 4, max_steps_per_rollout_epoch: 20}
  eval: {total_num_envs: 4, num_episodes: 8, decoding: greedy}
model: {gaussian: {max_state_dim: 4, hidden_sizes: [16, 16]}}
algorithm: {off_policy: {critic_hidden_sizes: [16, 16], warm_up: 20}, offline: {updates: 20}}
actor: {global_batch_size: 16, micro_batch_size: 16}
cluster: {num_threads: 1}
collect: {num_episodes: 6}
sft: {max_steps: 10, batch_size: 8, lr_warmup_steps: 1}
runner: {max_iterations: 10, eval_interval: 5, save_interval: 2, logger: {tensorboard: false, console: plain}}
"""
STORE = (
    LEARNING_OPENVLA
    + """
presets: {env: toy, experiment: hybrid}
env:
  tasks: [reach-red]
  max_episode_steps: 10
  pin_cpus: false
  num_processes: 1
  train: {total_num_envs: 4}
  eval: {total_num_envs: 4, num_episodes: 4, decoding: greedy}
sft: {max_steps: 12, batch_size: 8}
runner: {logger: {tensorboard: false}}
store: {episodes_per_shard: 4, publish_interval: 4, successes_only: false, poll_s: 0.2, steps_per_episode: 0.25}
"""
)
CONFIGS = {"tiny": PLAIN, "mlp": MLP, "store": STORE}
FSDP = (
    "actor.training_backend=fsdp",
    "cluster.device=cpu",
    "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}",
)
ASYNC = ("rollout.pipeline_stages=2", "algorithm.decoupled.enabled=true", "runner.max_staleness=1")
BRANCH = (
    *("algorithm=branch", "algorithm.group_size=4", "algorithm.rollout_epoch=1", "env.train.auto_reset=false"),
    *("env.max_episode_steps=12", "env.train.total_num_envs=8", "actor.optim.critic_warmup_iterations=0"),
)
RESIDUAL = (
    *("algorithm=residual", "model.warm_start={inputs}/base/policy", "algorithm.off_policy.num_q=4"),
    *("model.small_actor.hidden_sizes=[16,16]", "model.small_actor.scale=0.5"),
)
DEMOS = "algorithm.off_policy.demos={inputs}/mlp_demos"


@dataclass(frozen=True)
class Learner:
    """A run. In arguments ``{run}`` is its directory and ``{inputs}`` that of datasets and of configurations.

    Attributes:
        roles: command lines that run beside each other; each that ends early is continued.
        resumes: what is interrupted is continued with `embodrl resume`, otherwise with the same command again.
        exact: it ends bit for bit as an undisturbed run does.
        progress: files in its directory that grow once it works.
        inputs: what it needs.
    """

    roles: tuple[tuple[str, ...], ...]
    resumes: bool = True
    exact: bool = True
    progress: str = "*.jsonl"
    inputs: tuple[str, ...] = ()


def _train(config: str, *settings: str, exact: bool = True, inputs: tuple[str, ...] = ()) -> Learner:
    command = ("train", "--config", f"{{inputs}}/{config}.yaml", "runner.output_dir={run}", *settings)
    return Learner((command,), exact=exact, inputs=inputs)


def _store(role: str) -> tuple[str, ...]:
    paths = ("store.url={run}/store", f"store.spool_dir={{run}}/spool_{role}", "sft.output_dir={run}/out")
    return ("store", role, "--config", "{inputs}/store.yaml", *paths)


LONGER = "runner.max_iterations=12"
LEARNERS = {
    "ppo": _train("tiny", LONGER),
    "own actor process": _train("tiny", LONGER, "actor.own_process=true"),
    "async": _train("tiny", LONGER, *ASYNC, exact=False),
    "evaluation beside training": _train("tiny", LONGER, "runner.eval_async=true"),
    "branch": _train("tiny", LONGER, *BRANCH),
    "fsdp": _train("tiny", LONGER, *FSDP),
    "dagger": _train("tiny", LONGER, "algorithm=dagger", "model.num_action_chunks=1", *BRANCH[-1:]),
    "sac": _train("mlp"),
    "rlpd": _train("mlp", "algorithm=rlpd", DEMOS, inputs=("mlp_demos",)),
    "residual": _train("mlp", *RESIDUAL, inputs=("mlp_demos", "base")),
    "iql": _train("mlp", "algorithm=iql", DEMOS, inputs=("mlp_demos",)),
    "sft": Learner(
        (
            (
                *("sft", "--config", "{inputs}/tiny.yaml", "sft.data_dir={inputs}/tiny_demos", "sft.output_dir={run}"),
                *("sft.max_steps=40", "sft.batch_size=8", "sft.log_interval=1", "sft.save_interval=5"),
            ),
        ),
        inputs=("tiny_demos",),
    ),
    "store": Learner((_store("train"), _store("collect")), resumes=False, exact=False, progress="store/**/*"),
}


def collect(config: str) -> tuple[str, ...]:
    """Return the command that collects demonstrations for a configuration."""
    return ("collect", "--config", f"{{inputs}}/{config}.yaml", f"collect.output_dir={{inputs}}/{config}_demos")


INPUTS = {
    "tiny_demos": collect("tiny"),
    "mlp_demos": collect("mlp"),
    "base": ("sft", "--config", "{inputs}/mlp.yaml", "sft.data_dir={inputs}/mlp_demos", "sft.output_dir={inputs}/base"),
}


class References:
    """Undisturbed runs and what learners need, each made once, in processes forked from one that has the imports.

    Args:
        place: a directory.

    Raises:
        RuntimeError: an undisturbed run fails.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._server = ForkServer(1)
        self._results: dict[str, Result] = {}
        place.mkdir(parents=True, exist_ok=True)
        for name, text in CONFIGS.items():
            (place / f"{name}.yaml").write_text(text)

    def prepare(self, learner: Learner) -> None:
        """Make what a learner needs."""
        for name in learner.inputs:
            if not (self.place / f"{name}.done").exists():
                self._run(INPUTS[name], self.place)
                (self.place / f"{name}.done").touch()

    def result(self, name: str) -> Result:
        """Return the result of an undisturbed run."""
        if name not in self._results:
            run = self.place / f"whole_{name.replace(' ', '_')}"
            self._run(LEARNERS[name].roles[0], run)
            self._results[name] = run_result(run)
        return self._results[name]

    def _run(self, template: Sequence[str], run: Path) -> None:
        arguments = fill_in(template, run, self.place)
        code, _, errors = self._server.run(arguments, environment(), INPUT_TIMEOUT_S)
        if code != 0:
            raise RuntimeError(f"the undisturbed {' '.join(arguments)} ends with {code}: {errors}")


def fill_in(template: Sequence[str], run: Path, inputs: Path) -> list[str]:
    """Put the directories into a command line, in which other braces are settings."""
    return [part.replace("{run}", str(run)).replace("{inputs}", str(inputs)) for part in template]


def run_result(run: Path) -> Result:
    """Return the metrics without times and the hash of the policy."""
    return {"rows": rows(next(run.glob("*metrics.jsonl"))), "policy": digest(run / "policy")}


def difference(expected: Result, found: Result, exact: bool) -> str:
    """Say what is wrong with a result, or nothing.

    Args:
        expected: of the undisturbed run.
        found: of the disturbed one.
        exact: all must be equal, unless the rows say that simulators were restarted or episodes lost; otherwise the
            iterations are compared.
    """
    theirs, mine = _rows(expected), _rows(found)
    if [_step(row) for row in mine] != [_step(row) for row in theirs]:
        return f"rows of {[_step(row) for row in mine]} in place of {[_step(row) for row in theirs]}"
    if not exact or _says_lost(mine):
        return ""
    for left, right in zip(theirs, mine, strict=True):
        names = [name for name in left | right if name not in RESTARTS and left.get(name) != right.get(name)]
        if names:
            name = names[0]
            return f"{name} of row {_step(left)} is {right.get(name)} in place of {left.get(name)}"
    return "" if expected["policy"] == found["policy"] else "the policy differs, and no row does"


def _rows(result: Result) -> list[dict[str, object]]:
    """Return a row for each iteration: evaluations beside training add theirs when they are done."""
    content = result["rows"]
    assert isinstance(content, list)
    merged: dict[object, dict[str, object]] = {}
    for row in content:
        told = {name: value for name, value in row.items() if value is not None}
        merged[_step(row)] = merged.get(_step(row), {}) | told
    return [merged[step] for step in sorted(merged, key=lambda step: float(str(step)))]


def _step(row: Mapping[str, object]) -> object:
    return row.get("iteration", row.get("step"))


def _says_lost(found: Sequence[Mapping[str, object]]) -> bool:
    """Tell whether episodes ended by a fault, which the rows count: what is trained on is then not the same."""
    return any(value for row in found for name, value in row.items() if name.endswith("lost_episodes"))


def check_store(run: Path) -> str:
    """Say which episodes of a store were lost, repeated or read twice, or nothing."""
    from embodrl.storage.checkpoint import CheckpointManager
    from embodrl.store.shards import EPISODES
    from embodrl.store.store import Store

    store = Store(str(run / "store"))
    marks = {name: mark for name in store.names(EPISODES) if (mark := store.mark(name))}
    found = Counter(one for mark in marks.values() for one in mark.texts("ids"))
    if twice := [one for one, times in found.items() if times > 1]:
        return f"stored more than once: {twice}"
    progress = marks[max(marks)].fields("collector")
    opened = {int(number) for number in progress.numbers("open")}
    finished = {int(name.rpartition("-")[2]) for name in found}
    if finished & opened or finished | opened != set(range(progress.integer("next"))):
        return f"lost: of {progress.integer('next')} attempts, {len(finished)} are stored and {len(opened)} open"
    checkpoint, _ = CheckpointManager(run / "out", 1).latest_good()
    assert checkpoint is not None
    read = checkpoint.state.fields("data_rng").fields("store").texts("shards")
    if len(set(read)) != len(read) or not set(read) <= set(marks):
        return f"shards read {json.dumps(read)} of {sorted(marks)}"
    return ""
