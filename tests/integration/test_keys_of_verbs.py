"""All verbs x all keys: what a verb is given it reads, refuses, or says that it ignores."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from reads import recorded, silent

from embodrl import api
from embodrl.config.compose import concerning
from embodrl.config.load import LoadedConfig
from embodrl.config.schema.readers import Verb

pytestmark = pytest.mark.long

BASE = [
    *("env=toy", "model.warm_start=null", "model.random_weights=true", "runner.logger.console=off"),
    *("env.num_processes=1", "cluster.num_threads=1"),
    *("env.train.total_num_envs=2", "env.train.max_steps_per_rollout_epoch=20", "env.eval.total_num_envs=2"),
    *("env.eval.num_episodes=2", "actor.global_batch_size=4", "actor.micro_batch_size=4"),
    *("runner.max_iterations=2", "runner.eval_interval=1", "runner.save_interval=1", "algorithm.update_epoch=1"),
    "actor.optim.critic_warmup_iterations=0",
]
SHAPING = {"algorithm.gamma", "algorithm.reward_type"}
"""Read where rewards are shaped by a potential."""
EXPLAINED: dict[Verb, set[str]] = {
    # They choose nodes of the graph; of the kinds of weight_sync all but shared are refused in one process.
    "train": {"algorithm.recompute_logprobs", "rollout.weight_sync"},
    # A rule keeps the seeds of demonstrations apart from these.
    "collect": {"env.eval.num_episodes", "env.eval.seed", *SHAPING},
    "eval": SHAPING,
    "sft": SHAPING,
    # Read when a client comes, or a second one; follow where the policy is a run's.
    "serve": {f"serve.{name}" for name in ("max_batch_size", "max_wait_ms", "max_connections", "follow")}
    | {"serve.execution_horizon"},
}
"""Settings that these small runs have no occasion to read."""


def run(verb: Verb, loaded: LoadedConfig) -> None:
    if verb == "train":
        from embodrl.runs.train import train

        train(loaded)
    elif verb == "eval":
        from embodrl.runs.evaluate import evaluate

        evaluate(loaded)
    elif verb == "collect":
        from embodrl.runs.collect import collect

        collect(loaded.config, loaded.deployment)
    elif verb == "sft":
        from embodrl.runs.sft import sft

        sft(loaded)
    else:
        from embodrl.serving.verb import serve

        serve(loaded, say=lambda line: os.kill(os.getpid(), signal.SIGTERM) if line == "ready" else None)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demos") / "demos"
    api.collect([*concerning(BASE, "collect"), f"collect.output_dir={directory}", "collect.num_episodes=4"])
    return directory


@pytest.mark.parametrize("verb", ["train", "eval", "collect", "sft", "serve"])
def test_no_key_is_ignored_in_silence(verb: Verb, tmp_path: Path, demos: Path) -> None:
    base = [*BASE, f"runner.output_dir={tmp_path / 'run'}", f"collect.output_dir={tmp_path / 'demos'}"]
    base += ["collect.num_episodes=2", f"sft.data_dir={demos}", f"sft.output_dir={tmp_path / 'sft'}", "sft.max_steps=2"]
    base += ["sft.batch_size=4", "sft.lr_warmup_steps=1", "sft.eval_interval=1", "serve.port=0"]
    base.append("serve.protocols=[openpi,vla_eval,gr00t,act,http]")
    base = concerning(base, verb)
    with recorded() as seen:
        loaded = api._load(base, (), verb)
        run(verb, loaded)
    assert set(silent(verb, base, loaded.config, seen)) - EXPLAINED.get(verb, set()) == set()
