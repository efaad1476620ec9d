"""Workflows on the real simulator, and through the command line."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_chat_server import call, foreign, says
from runs import HERE, embodrl, metrics
from test_examples import run_example
from tiny_language_models import write_language_model

from embodrl.config import load_config
from embodrl.errors import EnvError
from embodrl.types import Observation, PolicyOutput
from embodrl.workers.workflows.async_pool import AsyncPool

NUM_ENVS = 12
TWO = "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"


@pytest.mark.slow
@pytest.mark.long
def test_the_example_trains(tmp_path: Path) -> None:
    train = {"total_num_envs": 10, "max_steps_per_rollout_epoch": 6, "auto_reset": False}
    rows = run_example("workflow", train, tmp_path, "env=toy")
    assert [row.get("workflow/failed_episodes") for row in rows] == [None, 0, 0]
    assert rows[2]["rollout/episodes"] == 10 and rows[2]["train/num_updates"]


SHORT = """
from embodrl.workers.workflows.workflow import ChunkWorkflow
from dataclasses import replace


class Short(ChunkWorkflow):
    async def run_episode(self, engine, env, task):
        return await super().run_episode(engine, env, replace(task, max_chunks=2))
"""


def test_a_run_is_evaluated_by_its_workflow_on_the_way_and_afterwards(tmp_path: Path) -> None:
    """An episode of two chunks of one action each."""
    (tmp_path / "short.py").write_text(SHORT)
    run_dir, size = tmp_path / "run", ("env.train.total_num_envs=8", "env.num_processes=2")
    order = ("env=toy", "model=mlp", "runner=debug", "runner.max_iterations=1", f"runner.output_dir={run_dir}", *size)
    order += ("env.train.auto_reset=false", "rollout.workflow=short:Short", "env.train.max_steps_per_rollout_epoch=4")
    order += ("env.eval.num_episodes=8", "model.num_action_chunks=1")
    done = embodrl("train", *order, search_path=tmp_path)
    assert done.code == 0, done.stderr
    assert metrics(run_dir)[-1]["eval/episode_length"] <= 2  # type: ignore[operator]
    found: list[dict[str, Any]] = []
    for number, more in enumerate(((), (TWO,))):
        directory = tmp_path / f"eval_{number}"
        done = embodrl(
            "eval",
            run_dir,
            "env.eval.total_num_envs=4",
            *more,
            "--output",
            directory,
            search_path=tmp_path,
        )
        assert done.code == 0, done.stderr
        found.append(json.loads((directory / "eval.json").read_text()))
        assert max(episode["length"] for episode in found[-1]["per_episode"]) == 2
    for one, other in zip(found[0]["per_episode"], found[1]["per_episode"], strict=True):
        # The sizes of the batches, which rounding depends on, vary with a workflow.
        assert one == other | {"episode_return": pytest.approx(other["episode_return"], abs=1e-4)}


AGENTS = ("env=toy", "model=mlp", "rollout.workflow=two_agents:Pilots", "runner.save_interval=1")
AGENTS += ("env.train.total_num_envs=8", "env.num_processes=2", "env.eval.num_episodes=4")
AGENTS += ("env.train.auto_reset=false", "env.train.max_steps_per_rollout_epoch=4", "model.num_action_chunks=1")
AGENTS += ("env.max_episode_steps=4",)


def agents_trained(run_dir: Path, *more: str) -> list[dict[str, Any]]:
    done = embodrl("train", *AGENTS, "runner=debug", *more, f"runner.output_dir={run_dir}")
    assert done.code == 0, done.stderr
    rows = metrics(run_dir)
    played = [row for row in rows if row["iteration"]]
    assert played
    for row in played:
        assert row["rollout/agent/second/return"] > row["rollout/agent/first/return"] + 5  # type: ignore[operator]
        assert row["workflow/failed_episodes"] == 0 and row["train/num_updates"]
    return rows


@pytest.mark.slow
def test_two_agents_continue_where_they_stopped(tmp_path: Path) -> None:
    whole = agents_trained(tmp_path / "whole", "runner.max_iterations=2")
    agents_trained(tmp_path / "half", "runner.max_iterations=1")
    done = embodrl("resume", tmp_path / "half", "runner.max_iterations=2")
    assert done.code == 0, done.stderr
    half = metrics(tmp_path / "half")
    assert [row["env_steps"] for row in half] == [row["env_steps"] for row in whole] and half[-1]["iteration"] == 2
    for name in ("rollout/return", "rollout/agent/first/return", "rollout/agent/second/return", "train/value_loss"):
        # The sizes of the batches, which rounding depends on, vary with a workflow.
        assert half[-1][name] == pytest.approx(whole[-1][name], rel=1e-3), name


@pytest.mark.slow
def test_two_agents_train_in_two_processes_and_are_evaluated(tmp_path: Path) -> None:
    rows = agents_trained(
        tmp_path / "run", "algorithm=grpo", "algorithm.group_size=2", *AGENTS, TWO, "runner.max_iterations=1"
    )
    evaluated = {name: rows[-1][f"eval/agent/{name}/return"] for name in ("first", "second")}
    assert evaluated["first"] + 5 < evaluated["second"]
    assert evaluated["first"] < rows[-1]["eval/return"] < evaluated["second"]
    done = embodrl("eval", tmp_path / "run", "--output", tmp_path / "eval")
    assert done.code == 0, done.stderr
    agents = json.loads((tmp_path / "eval" / "eval.json").read_text())["per_agent"]
    assert agents.keys() == {"first", "second"} and agents["first"]["mean_length"] > 0


def test_the_agents_of_the_example_train(tmp_path: Path) -> None:
    examples = HERE.parents[1] / "examples"
    size = ("env.train.total_num_envs=16", "env.num_processes=2", "env.eval.num_episodes=8", "env.pin_cpus=false")
    run_dir = tmp_path / "run"
    order = ("--config", examples / "agents" / "config.yaml", f"runner.output_dir={run_dir}", "runner.max_iterations=2")
    done = embodrl("train", *order, *size, search_path=f"{examples / 'agents'}:{examples / 'planner'}")
    assert done.code == 0, done.stderr
    rows = metrics(run_dir)
    assert [row["iteration"] for row in rows] == [0, 1, 2] and rows[2]["train/num_updates"]
    for name in ("guide", "driver"):
        assert rows[2][f"rollout/agent/{name}/success_rate"] == rows[2]["rollout/success_rate"]
        assert rows[2][f"rollout/agent/{name}/episode_length"] == 1
    assert rows[2]["eval/episode_length"] == 2 and rows[2]["workflow/failed_episodes"] == 0


@pytest.mark.slow
def test_two_processes_play_the_episodes_of_one(tmp_path: Path) -> None:
    """Every episode has its own random numbers, whichever process plays it, before and after an update."""
    import torch

    import embodrl as package

    found: list[list[Any]] = []
    for number, place in enumerate((("env.num_processes=2",), ("env.num_processes=2", TWO))):
        order = ["env=toy", "model=mlp", "runner=debug", f"runner.output_dir={tmp_path / str(number)}", *place]
        order += ["rollout.workflow=embodrl.workers.workflows.workflow:ChunkWorkflow", "env.train.auto_reset=false"]
        order += ["env.train.total_num_envs=8", "env.train.max_steps_per_rollout_epoch=4", "model.num_action_chunks=1"]
        with package.Session([*order]) as session:
            batches, rows = [], []
            for _ in range(2):
                batches.append(session.rollout())
                session.train(batches[-1], session.advantages(batches[-1]))
                rows.append(session.sync())
        assert [row["workflow/failed_episodes"] for row in rows] == [0, 0]
        assert rows[-1]["env_steps"] == sum(int(batch.valid.sum()) for batch in batches)
        found.append(batches)
    for one, other in zip(*found, strict=True):
        for name in ("valid", "terminated", "truncated", "task_id", "group_id", "policy_version"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        for name in ("rewards", "logprobs", "values", "bootstrap_values"):
            # The sizes of the batches, which rounding depends on, vary with a workflow.
            assert torch.allclose(getattr(one, name), getattr(other, name), atol=1e-3), name
    assert int(found[0][0].policy_version.max()) == 0 and int(found[0][1].policy_version.max()) == 1
    names = sorted(path.name for path in (tmp_path / "1" / "logs").glob("rollout_*.log"))
    assert names == ["rollout_0.log", "rollout_1.log"]


class Fixed:
    """A policy that draws its actions from what it sees, so that the order of calls does not matter."""

    version = 0

    def row_generators(self, seeds: Any) -> None:
        return None

    def offload(self) -> None:
        """There is nothing to free."""

    def random_state(self) -> list[str]:
        return []

    def set_random_state(self, states: list[str]) -> None:
        assert states == []

    def act(self, observation: Observation, compute_values: bool, generators: Any = None) -> PolicyOutput:
        import torch

        batch = observation.batch_size
        sums = observation.images.reshape(batch, -1).astype(np.int64).sum(axis=1)
        actions = np.stack([np.random.default_rng(s).uniform(-0.5, 0.5, (5, 7)) for s in sums]).astype(np.float32)
        values = torch.zeros(batch, 1) if compute_values else None
        return PolicyOutput(actions, torch.zeros(batch, 5, 7), values, {"sums": torch.from_numpy(sums)})

    def values(self, observation: Observation) -> Any:
        import torch

        return torch.zeros(observation.batch_size, 1)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.xdist_group("maniskill")
def test_twelve_episodes_at_a_time_on_maniskill_equal_those_in_lockstep() -> None:
    pytest.importorskip("mani_skill")
    import torch

    from embodrl.workers.collector import SyncCollector
    from embodrl.workers.env import make_pool
    from embodrl.workers.workflows.runner import WorkflowCollector
    from embodrl.workers.workflows.workflow import ChunkWorkflow

    config = load_config(
        [
            f"env.train.total_num_envs={NUM_ENVS}",
            "env.pin_cpus=false",
            "env.start_timeout_s=600",  # on a machine that others load
            "env.max_episode_steps=10",
            "env.train.max_steps_per_rollout_epoch=10",
            "env.train.auto_reset=false",
            "env.cameras=[{height: 32, width: 32}]",
            "actor.global_batch_size=8",
            "actor.micro_batch_size=8",
        ]
    ).config
    try:
        pool = make_pool(config, NUM_ENVS)
        pool.start()
    except EnvError as error:
        if "Vulkan" in str(error):
            pytest.skip(error.message)
        raise
    never: Any = lambda: False  # noqa: E731
    engine: Any = Fixed()
    with closing(pool):
        wanted, _ = SyncCollector(config, pool, engine, never).gather(0)
        pool.call("rebuild")  # what follows a reset depends on its seed alone
        worker = WorkflowCollector(config, pool, engine, never, workflow=ChunkWorkflow())
        found, metrics = worker.gather(0)
        asyncio.run(state_round_trip(pool))
    played = wanted.valid.any(-1)
    assert torch.equal(found.valid, wanted.valid) and torch.equal(found.rewards, wanted.rewards)
    assert torch.equal(found.forward_inputs["sums"][played], wanted.forward_inputs["sums"][played])
    assert metrics["rollout/episodes"] == NUM_ENVS and metrics["workflow/failed_episodes"] == 0


async def state_round_trip(pool: Any) -> None:
    """One scene continues bit-exactly, in its own row and in another one, beside an episode that is not disturbed."""
    environments = AsyncPool(pool)
    env, beside, other = environments.environments()[:3]
    await asyncio.gather(*(one.initialize("PushCube-v1", 3) for one in (env, beside)))
    rng = np.random.default_rng(1)
    moves = [{"actions": rng.uniform(-0.5, 0.5, (2, 7)).astype(np.float32)} for _ in range(3)]
    await env.execute("act", moves[0])
    state = await env.get_state()
    wanted = [await env.execute("act", move) for move in moves[1:]]
    for again in (other, env):
        await again.load_state(state)
        for move, before in zip(moves[1:], wanted, strict=True):
            result = await again.execute("act", move)
            np.testing.assert_array_equal(result.reward, before.reward)
            np.testing.assert_array_equal(result.observation.images, before.observation.images)
    for number, move in enumerate(moves):
        result = await beside.execute("act", move)
        if number:
            np.testing.assert_array_equal(result.reward, wanted[number - 1].reward)
    environments.close()


def test_the_agent_of_the_example_trains(tmp_path: Path) -> None:
    """It has OpenAI's client, a URL and a key; evaluations play its episodes, too."""
    pytest.importorskip("openai")
    example = HERE.parents[1] / "examples" / "agent"
    size = ("env.train.total_num_envs=16", "env.num_processes=2", "env.eval.num_episodes=8", "env.pin_cpus=false")
    run_dir = tmp_path / "run"
    order = ("--config", example / "config.yaml", f"runner.output_dir={run_dir}", "runner.max_iterations=2", *size)
    done = embodrl("train", *order, search_path=example)
    assert done.code == 0, done.stderr
    rows = metrics(run_dir)
    assert [row["iteration"] for row in rows] == [0, 1, 2] and rows[2]["train/num_updates"]
    assert rows[2]["workflow/failed_episodes"] == 0 and rows[2]["train/grad_norm"]
    # Before the first step the trainer's log-probs are those of the server; afterwards the weights differ.
    assert abs(rows[1]["train/first_minibatch_kl"]) < 1e-9 < rows[1]["train/approx_kl"]  # type: ignore[operator]
    assert 1 <= rows[2]["eval/episode_length"] <= 2  # type: ignore[operator]


def test_the_planner_of_the_example_trains(tmp_path: Path) -> None:
    """GRPO, and PPO with values; evaluations play the same episodes."""
    example = HERE.parents[1] / "examples" / "planner"
    size = ("env.train.total_num_envs=16", "env.num_processes=2")
    size += ("env.eval.num_episodes=8", "runner.max_iterations=2", "env.pin_cpus=false")
    ppo = ("algorithm=ppo", "env.train.auto_reset=false", "env.train.max_steps_per_rollout_epoch=2")
    for number, more in enumerate(((), ppo)):
        run_dir = tmp_path / str(number)
        order = ("--config", example / "config.yaml", f"runner.output_dir={run_dir}", *size, *more)
        done = embodrl("train", *order, search_path=example)
        assert done.code == 0, done.stderr
        rows = metrics(run_dir)
        assert [row["iteration"] for row in rows] == [0, 1, 2] and rows[2]["train/num_updates"]
        assert rows[2]["workflow/failed_episodes"] == 0 and rows[2]["train/entropy"]
        assert ("train/value_loss" in rows[2]) == bool(more)
        assert 1 <= rows[2]["eval/episode_length"] <= 2  # type: ignore[operator]


@pytest.mark.parametrize("name", ["web_agent", pytest.param("code_agent", marks=pytest.mark.long)])
def test_the_agents_with_tools_of_the_examples_train(tmp_path: Path, name: str) -> None:
    """Every episode has a message that reads or runs a program, and one that answers."""
    example = HERE.parents[1] / "examples" / name
    size = ("env.train.total_num_envs=16", "env.eval.num_episodes=8", "runner.max_iterations=2", "env.pin_cpus=false")
    order = ("--config", example / "config.yaml", f"runner.output_dir={tmp_path}", *size)
    done = embodrl("train", *order, search_path=example)
    assert done.code == 0, done.stderr
    rows = metrics(tmp_path)
    assert [row["iteration"] for row in rows] == [0, 1, 2] and rows[2]["train/num_updates"]
    assert rows[2]["workflow/failed_episodes"] == 0 and rows[2]["train/grad_norm"]
    assert rows[2]["env_steps"] == 2 * 16 * 2 and rows[2]["eval/episodes"] == 8 and rows[2]["eval/episode_length"] == 2


def test_a_language_model_behind_a_server_is_evaluated(tmp_path: Path) -> None:
    """The server always calls for red: that solves one of two tasks, in one message; the other one has two."""
    example = HERE.parents[1] / "examples" / "planner"
    order = ("env=toy", "env.tasks=[reach-red,reach-green]", "env.max_episode_steps=40", "env.train.auto_reset=false")
    order += ("rollout.workflow=reach:ReachWorkflow", "env.eval.num_episodes=8", f"runner.output_dir={tmp_path}")
    with foreign(says(None, [call("reach", '{"colour": "red"}')], "tool_calls")) as (url, asked):
        done = embodrl("eval", "model=remote_text", f"model.url={url}", *order, search_path=example)
    assert done.code == 0, done.stderr
    assert "reach-red 100.0 % of 4 episodes" in done.stdout and "reach-green 0.0 % of 4 episodes" in done.stdout
    roles = [[message["role"] for message in body["messages"]] for _, _, body in asked]
    assert roles.count(["user"]) == 8 and roles.count(["user", "assistant", "tool"]) == 4 and len(roles) == 12


def test_a_public_language_model_trains_and_is_exported(tmp_path: Path) -> None:
    """PPO from a directory of transformers, of experts, to a directory that transformers reads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    example = HERE.parents[1] / "examples" / "planner"
    public = write_language_model(tmp_path / "public", "qwen3_moe", max_position_embeddings=1024)
    size = ("env.train.total_num_envs=8", "algorithm.group_size=4", "env.num_processes=2", "env.pin_cpus=false")
    size += ("env.eval.num_episodes=4", "runner.max_iterations=1", "actor.precision=fp32", f"model.model_path={public}")
    size += ("algorithm.router_aux_loss_coef=0.01",)
    run_dir = tmp_path / "run"
    order = ("--config", example / "config.yaml", f"runner.output_dir={run_dir}", *size)
    done = embodrl("train", *order, search_path=example)
    assert done.code == 0, done.stderr
    rows = metrics(run_dir)
    assert rows[1]["train/num_updates"] and rows[1]["workflow/failed_episodes"] == 0 and rows[1]["train/grad_norm"]
    assert abs(rows[1]["train/first_minibatch_kl"]) < 1e-6  # type: ignore[operator]
    # Four experts, two per token: 2 if all are chosen equally often, 4 if always the same two, with certainty.
    assert 1 < rows[1]["train/router_aux_loss"] <= 4  # type: ignore[operator]
    done = embodrl("export", run_dir, tmp_path / "policy")
    assert done.code == 0, done.stderr
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (public, tmp_path / "policy"))
    routers = [name for name in after.state_dict() if name.endswith("mlp.gate.weight")]
    assert routers and not any((before.state_dict()[name] == after.state_dict()[name]).all() for name in routers)
    texts = [AutoTokenizer.from_pretrained(path).chat_template for path in (public, tmp_path / "policy")]
    assert texts[0] == texts[1] is not None
