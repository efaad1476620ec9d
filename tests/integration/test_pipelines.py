"""Pipelines train on the toy environment, and walking a graph gives what the written-out loop gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TINY, metrics
from safetensors.torch import load_file

from embodrl import testing
from embodrl.algorithms.advantages import compute_advantages
from embodrl.config.schema import Config
from embodrl.errors import PipelineError
from embodrl.learners.rollout import RolloutLearner
from embodrl.pipelines import nodes
from embodrl.pipelines.builtin import NODES
from embodrl.pipelines.context import PipelineContext
from embodrl.pipelines.graph import Pipeline
from embodrl.pipelines.load import load_config
from embodrl.runs.train import train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_as_it_was")]
SMALL = (
    "env.tasks=[reach-red]",
    "env.train.total_num_envs=8",
    "runner.eval_interval=0",
    "runner.eval_at_start=false",
    "runner.max_iterations=2",
    "actor.optim.lr_scheduler=constant",
)
IN_GROUPS = ("env.train.auto_reset=false", "env.train.max_steps_per_rollout_epoch=6", "algorithm.group_size=4")
GROUPS: dict[str, tuple[str, ...]] = {"ppo": ()}
"""Settings of algorithms that compare no groups; the others have ``IN_GROUPS``."""


def run(directory: Path, *overrides: str) -> list[dict[str, Any]]:
    directory.mkdir()
    config = directory / "tiny.yaml"
    config.write_text(TINY.replace("extensions: [stop_at]", "").replace("critic_warmup_iterations: 1, ", ""))
    loaded = load_config([*SMALL, *overrides, f"runner.output_dir={directory / 'run'}"], config, verb="train")
    assert train(loaded).exit_code == 0
    return metrics(directory / "run")  # pyright: ignore[reportReturnType]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "run" / "policy" / "model.safetensors")


# Below, ppo is compared with the loop; test_presets.py trains with every other algorithm.
@pytest.mark.parametrize("name", ["dapo", "srpo"])
def test_a_built_in_pipeline_trains(name: str, tmp_path: Path) -> None:
    groups = GROUPS.get(name, IN_GROUPS)
    rows = run(tmp_path / "one", f"algorithm={name}", *groups)
    assert [row["iteration"] for row in rows] == [1, 2]
    assert rows[1]["env_steps"] > rows[0]["env_steps"] > 0
    assert name == "dapo" or any(row["train/num_updates"] for row in rows)


def written_out(learner: RolloutLearner, iteration: int) -> dict[str, Any]:
    """An iteration as a loop without a graph."""
    context = learner.open_iteration(iteration)
    algorithm = context.config.algorithm
    batch, row = context.rollout.gather(context.iteration)
    row |= {"env_steps": batch.meta["env_steps"]} | context.rewards.apply(batch)
    if algorithm.kl.coef > 0:
        batch.ref_logprobs = context.updates.reference_logprobs(batch)
    row |= context.updates.update(batch, compute_advantages(batch, algorithm), context.shuffle)
    context.rollout.update_weights(context.engine.weights(), context.engine.version)
    return learner.close_iteration(row)


@pytest.mark.parametrize("name", ["ppo", *(pytest.param(name, marks=pytest.mark.long) for name in ("grpo", "srpo"))])
def test_a_graph_gives_the_numbers_of_the_loop(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (f"algorithm={name}", "algorithm.kl.coef=0.05", *GROUPS.get(name, IN_GROUPS))
    walked = run(tmp_path / "walked", *settings)
    monkeypatch.setattr(RolloutLearner, "step", written_out)
    assert run(tmp_path / "written", *settings) == walked
    left, right = weights(tmp_path / "walked"), weights(tmp_path / "written")
    assert left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)


BUILT: list[Config] = []


def build_retried(config: Config) -> Pipeline:
    """The plain pipeline with a node between that fails at first, after it has changed its batch."""
    BUILT.append(config)
    attempts = iter([True, False])

    def unsteady(context: PipelineContext, batch: Any) -> Any:
        rewards, batch.rewards = batch.rewards, batch.rewards + 1
        if context.iteration == 0 and next(attempts):
            raise ValueError("not yet")
        batch.rewards = rewards
        return batch

    pipeline = Pipeline("retried").add_node("rollout", f"{NODES}:rollout", role="rollout")
    pipeline.add_node("unsteady", unsteady, ("rollout",), retries=1)
    pipeline.add_node("advantage", f"{NODES}:advantage", ("unsteady",), "advantage")
    pipeline.add_node("train", f"{NODES}:train", ("unsteady", "advantage"), "train")
    return pipeline.add_node("sync", f"{NODES}:sync", ("train",), "sync")


@pytest.mark.long
def test_a_node_that_is_tried_again_leaves_no_trace_but_its_count(tmp_path: Path) -> None:
    BUILT.clear()
    rows = run(tmp_path / "retried", f"pipeline.fn={__name__}:build_retried")
    assert len(BUILT) == 1, "checking the configuration and running it share one pipeline"
    assert [row.pop("pipeline/retries") for row in rows] == [1, 0]
    assert rows == run(tmp_path / "plain")


def silent(context: PipelineContext) -> Any:
    """A rollout that does not say how many steps it took."""
    return context.rollout.gather(context.iteration)[0]


def build_silent(config: Config) -> Pipeline:
    """A pipeline whose steps are not counted."""
    pipeline = Pipeline("silent").add_node("rollout", silent, role="rollout")
    pipeline.add_node("advantage", f"{NODES}:advantage", ("rollout",), "advantage")
    pipeline.add_node("train", f"{NODES}:train", ("rollout", "advantage"), "train")
    return pipeline.add_node("sync", f"{NODES}:sync", ("train",), "sync")


def build_failing(config: Config) -> Pipeline:
    """A pipeline with a node that always fails."""

    def fails(context: PipelineContext, batch: Any) -> None:
        raise KeyError("colour")

    return build_silent(config).add_node("colours", fails, ("rollout",), "sink", retries=1)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        ("build_silent", ["pipeline 'silent' reports the number of simulated steps", "'env_steps': STEPS"]),
        (
            "build_failing",
            [
                "KeyError: 'colour'",
                "in node 'colours'",
                "after 2 attempts",
                "TrajectoryBatch [4, 8]",
                "rewards float32",
            ],
        ),
    ],
)
def test_a_failure_ends_the_run_and_says_where(build: str, says: list[str], tmp_path: Path) -> None:
    with pytest.raises(PipelineError) as caught:
        run(tmp_path / "bad", f"pipeline.fn={__name__}:{build}")
    assert all(text in str(caught.value) for text in says)


def test_a_node_is_tested_by_itself() -> None:
    small = ["env=toy", "model=mlp", "env.state=full", "env.num_processes=1", "actor.global_batch_size=8"]
    small += ["env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=10", "actor.micro_batch_size=8"]
    with testing.context(small) as context:
        batch, metrics = nodes.rollout(context)
        assert metrics["env_steps"] == 40 and batch.rewards.shape[:2] == (10, 4)
        advantages, _ = nodes.advantage(context, batch)
        assert advantages.advantages.shape[:2] == (10, 4)
    sac = ["env=toy", "model=mlp", "env.state=full", "algorithm=sac", "env.num_processes=1"]
    sac += ["env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=10"]
    with testing.context(sac) as context:
        batch, _ = nodes.rollout(context)
        assert nodes.store(context, batch)["replay/added"]
