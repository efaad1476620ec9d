"""Episodes that a script submits to a session, one by one, and learns from, on the toy environment."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import raises_code
from runs import tiny
from two_agents import Pilots

import embodrl
from embodrl.compat import areal
from embodrl.errors import EmbodrlError
from embodrl.workers.workflows.workflow import ChunkWorkflow

pytestmark = pytest.mark.slow

LONG_S = 60.0
unused: Any = (None, None)
WORKFLOW = ("rollout.workflow=embodrl.workers.workflows.workflow:ChunkWorkflow", "env.train.auto_reset=false")
SHORT = ("env.train.max_steps_per_rollout_epoch=6",)


class Held(ChunkWorkflow):
    """Plays an episode when it may."""

    def __init__(self, *held: str) -> None:
        self.held, self.allowed, self.seen = held, threading.Event(), []

    async def run_episode(self, engine: Any, env: Any, task: embodrl.EpisodeTask) -> embodrl.Trajectory:
        self.seen.append(task.data.get("name"))
        if task.data.get("name") in self.held:
            await asyncio.to_thread(self.allowed.wait, LONG_S)
        if task.data.get("name") == "wrong":
            raise ValueError("no such question")
        return await super().run_episode(engine, env, task)


@contextmanager
def session_of(tmp_path: Path, *settings: str) -> Iterator[embodrl.Session]:
    with embodrl.Session(tiny(), [f"runner.output_dir={tmp_path / 'run'}", *WORKFLOW, *SHORT, *settings]) as session:
        yield session


judging = threading.Event()


def length(episode: embodrl.Episode) -> float:
    judging.set()
    return float(len(episode.frames))


def test_an_episode_is_judged_while_another_plays(tmp_path: Path) -> None:
    with session_of(tmp_path, "reward.fn=test_session_episodes:length", "env.train.total_num_envs=2") as session:
        episodes, workflow = session.episodes(), Held("slow")
        judging.clear()
        episodes.submit({"name": "slow"}, workflow)
        episodes.submit({"name": "fast"}, workflow)
        (fast,) = episodes.wait(1, LONG_S)
        assert fast.task.data["name"] == "fast" and judging.wait(LONG_S)
        workflow.allowed.set()
        given = session.rollout(episodes.batch([fast, *episodes.wait(1, LONG_S)]))
        assert given.rewards.sum(dim=(0, 2)).tolist() == given.valid.any(-1).sum(0).tolist()


def test_episodes_come_as_they_end_and_none_begins_while_paused(tmp_path: Path) -> None:
    with session_of(tmp_path) as session:
        episodes, workflow = session.episodes(), Held("slow")
        assert session.episodes() is episodes
        slow = episodes.submit({"name": "slow", "task": "reach-green", "seed": 7}, workflow)
        wrong, fast = episodes.submit({"name": "wrong"}, workflow), episodes.submit("reach-red", workflow)
        first = {each.id: each for each in episodes.wait(2, LONG_S)}
        assert first.keys() == {wrong, fast}
        assert isinstance(first[wrong].error, ValueError) and first[wrong].trajectory is None
        assert first[fast].trajectory is not None and first[fast].task.name == "reach-red"
        for step in (session.rollout, session.evaluate, lambda: session.train(*unused)):
            with raises_code("session-episodes", EmbodrlError, "pause"):
                step()
        episodes.pause()
        last = episodes.submit({"name": "last"}, workflow)
        workflow.allowed.set()
        (found,) = episodes.wait(1, LONG_S)
        assert (found.id, found.task.name, found.task.seed) == (slow, "reach-green", 7)
        assert episodes.is_idle and "last" not in workflow.seen and not episodes.wait(1, 0.0)
        assert session.evaluate().episodes, "nothing runs, so that the environments are free"
        episodes.resume()
        (found,) = episodes.wait(1, LONG_S)
        assert found.id == last and workflow.seen[-1] == "last"
        for given, code in (("reach-rad", "task-unknown"), ({"seed": -1}, "episode-seed")):
            with raises_code(code, EmbodrlError):
                episodes.submit(given)
        with raises_code("workflow-class", EmbodrlError, "run_episode"):
            episodes.submit(None, object())  # pyright: ignore[reportArgumentType]
        with raises_code("workflow-class", EmbodrlError, "several agents"):
            episodes.submit(None, Pilots())


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_update_takes_submitted_episodes(staleness: int, tmp_path: Path) -> None:
    settings = (f"runner.max_staleness={staleness}", "algorithm.decoupled.enabled=true") if staleness else ()
    with session_of(tmp_path, "runner.max_iterations=3", *settings) as session:
        episodes = session.episodes()
        before = {name: value.clone() for name, value in session.policy.state_dict().items()}
        for version in range(2):
            for _ in range(6):
                episodes.submit()
            found = episodes.wait(4, LONG_S)
            with raises_code("session-episodes", EmbodrlError, "4"):
                session.rollout(episodes.batch(found[:3]))
            batch = session.rollout(episodes.batch(found))
            assert batch.batch_size == (2, 4)
            if not staleness:
                found += episodes.wait(2, LONG_S)
            session.train(batch, session.advantages(batch))
            row = session.sync()
            assert row["rollout/episodes"] == 4 and row["env_steps"] == 24 * (version + 1)
            found += episodes.wait(6 - len(found), LONG_S)
            assert all(each.error is None for each in found)
        episodes.submit("reach-red")
        (last,) = episodes.wait(1, LONG_S)
        assert last.trajectory is not None and {chunk.policy_version for chunk in last.trajectory.chunks} == {2}
        assert any(not torch.equal(value, before[name]) for name, value in session.policy.state_dict().items())
        if staleness:
            with raises_code("session-episodes", EmbodrlError, "batch"):
                session.rollout()


def test_submitted_episodes_are_not_saved(tmp_path: Path) -> None:
    with session_of(tmp_path, "runner.save_rollouts=true") as session:
        episodes = session.episodes()
        for _ in range(4):
            episodes.submit()
        with raises_code("session-episodes"):
            session.rollout(episodes.batch(episodes.wait(4, LONG_S)))


def test_groups_share_their_task_and_seed(tmp_path: Path) -> None:
    grouped = ("algorithm=grpo", "algorithm.group_size=2", "model.add_value_head=false")
    with session_of(tmp_path, *grouped) as session:
        episodes = session.episodes()
        for _ in range(4):
            episodes.submit()
        found = episodes.wait(4, LONG_S)
        starts = sorted((each.task.name, each.task.seed) for each in found)
        assert starts[0] == starts[1] != starts[2] == starts[3]
        assert episodes.batch(found)["group_id"][0].tolist() == [0, 0, 1, 1]
        with raises_code("episode-groups", EmbodrlError, "groups of 2"):
            episodes.batch(found[:3])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("rollout.workflow=null",), "no workflow"),
        (("rollout.workflow=two_agents:Pilots",), "several agents"),
        (("rollout.own_process=true",), "other processes"),
        (("rollout.enable_offload=true",), "leave their memory"),
    ],
)
def test_a_session_that_can_not_play_them_says_why(settings: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    with session_of(tmp_path, *settings) as session, raises_code("session-episodes", EmbodrlError, reason):
        session.episodes()


class Answer(areal.RolloutWorkflow):
    """A workflow in AReaL's way: the longer the answer, the better."""

    async def arun_episode(self, engine: areal.InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        tokenizer = areal.Tokenizer()
        input_ids = tokenizer.apply_chat_template(data["messages"], add_generation_prompt=True)
        resp = await engine.agenerate(areal.ModelRequest(input_ids=input_ids, tokenizer=tokenizer))
        return {"rewards": torch.tensor([resp.output_len / 8])}


def test_an_episode_of_areals_is_submitted_and_trained_on(tmp_path: Path) -> None:
    sizes = "{hidden_size: 16, intermediate_size: 24, num_attention_heads: 2, max_prompt_tokens: 64, max_new_tokens: 8}"
    small = ["env=toy", "model=planner", f"model.planner={sizes}", *WORKFLOW]
    small += ["algorithm=grpo", "algorithm.group_size=2", "algorithm.rollout_epoch=1"]
    small += ["env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=1", "env.pin_cpus=false"]
    small += ["env.num_processes=1", "actor.global_batch_size=4", "actor.micro_batch_size=4"]
    with embodrl.Session([*small, f"runner.output_dir={tmp_path / 'run'}"]) as session:
        episodes = session.episodes()
        for _ in range(4):
            episodes.submit({"messages": [{"role": "user", "content": "write"}]}, Answer())
        found = episodes.wait(4, LONG_S)
        assert all(each.error is None for each in found)
        batch = session.rollout(episodes.batch(found))
        assert all(0 < reward <= 1 for reward in batch.rewards[0, :, 0].tolist())
        session.train(batch, session.advantages(batch))
        assert session.sync()["env_steps"] == 4
