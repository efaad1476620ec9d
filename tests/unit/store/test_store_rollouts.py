"""Episodes of a store as rollouts: transitions by hand, and each episode in one update, whatever is undone."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from torch import Tensor

from embodrl.config import load_config
from embodrl.config.yaml_text import to_yaml
from embodrl.data.demos import ACTED_BY, EXECUTED, POLICY_VERSION, REWARD, TERMINATED, Demos
from embodrl.data.replay import HUMAN, ReplayBuffer, ReplayStores, frames_of
from embodrl.errors import ConfigError, StoreError
from embodrl.fields import Fields
from embodrl.store.rollouts import StoreCollector, episode_metrics, trajectories
from embodrl.store.shards import ShardPart
from embodrl.trainer.schedule import Schedule
from embodrl.trainer.settings import refuse_impossible
from embodrl.types import Observation

CHUNK = 2


class StateEngine:
    """Reads the state as it is."""

    version = 0

    def inputs(self, observation: Observation) -> dict[str, Tensor]:
        return {"state": torch.from_numpy(observation.state)}

    def update_weights(self, weights: object, version: int) -> None:
        self.version = version


def recorded(lengths: Sequence[int], ended: Sequence[bool], first: int = 0, tasks: str = "reach-red") -> Demos:
    """Episodes whose frames are numbered: state, executed action and reward of a frame are its number."""
    count = sum(lengths)
    numbers = np.arange(first, first + count, dtype=np.float32)
    terminated = np.zeros(count, np.bool_)
    last = np.cumsum(lengths) - 1
    terminated[last] = ended
    columns: dict[str, Any] = {
        "images": np.zeros((count, 1, 2, 2, 3), np.uint8),
        "state": numbers[:, None],
        "actions": numbers[:, None],
        EXECUTED: numbers[:, None],
        REWARD: numbers,
        TERMINATED: terminated,
        POLICY_VERSION: numbers.astype(np.int64),
        ACTED_BY: np.where(numbers == 1, HUMAN, 0),
    }
    names = [tasks] * len(lengths)
    return Demos.of_episodes(columns, lengths, names, names, [(None, bool(one)) for one in ended])


def config(*settings: str) -> Any:
    small = ("env.train.total_num_envs=2", "env.train.max_steps_per_rollout_epoch=2", "env.num_processes=1")
    chosen = ("env=toy", "model=mlp", "algorithm=sac", "env.state=full", "env.tasks=[reach-red]")
    return load_config([*chosen, *small, f"model.num_action_chunks={CHUNK}", "store.url=store", *settings]).config


def test_transitions_of_recorded_episodes_by_hand() -> None:
    # Frames 0 to 4 end the task with the third chunk's only action; 5 to 8 are cut off.
    batch = trajectories(recorded([5, 4], [True, False]), config(), StateEngine())  # type: ignore[arg-type]
    assert batch.valid[..., 0].tolist() == [[True, True], [True, False], [True, False]]
    assert batch.valid[2, 0].tolist() == [True, False]
    assert batch.rewards[:, 0].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 0.0]]
    assert batch.terminated.any(-1).tolist() == [[False, False], [False, False], [True, False]]
    assert batch["source"].tolist() == [[HUMAN, 0], [0, 0], [0, 0]]
    assert batch.policy_version[:2].tolist() == [[0, 5], [2, 7]]
    assert batch.success is not None and batch.success.tolist() == [[False, False], [False, False], [True, False]]
    frames = frames_of(batch)
    seen = frames["inputs.state"].squeeze(-1).tolist()
    # The cut-off episode has one chunk, and the observation after it.
    assert seen == [0.0, 2.0, 4.0, 5.0, 7.0] and frames["acted"].tolist() == [True, True, True, True, False]
    assert frames["actions"].squeeze(-1)[:3].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 4.0]]
    stores = ReplayStores(ReplayBuffer(100, 10**6))
    assert stores.add(batch) == 4 == stores.online.stored
    assert batch.meta["env_steps"] == 9


def test_metrics_of_recorded_episodes_by_hand() -> None:
    found = episode_metrics(recorded([3, 1], [True, False]), 3)
    assert found == {
        "rollout/success_rate": 0.5,
        "rollout/episodes": 2.0,
        "rollout/episode_length": 2.0,
        "rollout/return": 3.0,  # 0 + 1 + 2 and 3, over two
        "staleness/mean": 1.5,  # 3, 2, 1 and 0
        "staleness/max": 3.0,
    }


def test_episodes_of_another_task_are_refused() -> None:
    with raises_code("store-other-tasks", StoreError, "reach-green"):
        trajectories(recorded([2], [True], tasks="reach-green"), config(), StateEngine())  # type: ignore[arg-type]


class Reader:
    """A reader to which a test gives the parts that arrive."""

    def __init__(self) -> None:
        self.arriving: list[ShardPart] = []
        self.known: list[str] = []
        self.restored: Fields | None = None

    def poll(self, most: int) -> bool:
        return bool(self.arriving)

    def take(self) -> list[ShardPart]:
        taken, self.arriving = self.arriving, []
        self.known += [part.shard for part in taken]
        return taken

    def unread(self, parts: Sequence[ShardPart]) -> dict[str, object]:
        left = {part.shard for part in parts}
        return {"shards": [name for name in self.known if name not in left]}

    def restore(self, state: Fields) -> None:
        self.restored = state


class Collecting:
    def __init__(self) -> None:
        self.reader = Reader()
        self.stopped = False
        weights = SimpleNamespace(catch_up=lambda: None, store=SimpleNamespace(remove=lambda name: None))
        engine = StateEngine()
        settings = config("store.poll_s=0.001")
        reader: Any = self.reader
        made: Any = (engine, reader, weights)
        self.collector = StoreCollector(settings, *made, lambda demos: None, lambda: self.stopped)

    def arrive(self, number: int) -> None:
        """Let a shard of one episode of four steps arrive, as many as an iteration takes."""
        demos = recorded([4], [True], first=4 * number)
        self.reader.arriving.append(ShardPart(f"shard-{number}", [f"a-{number}"], demos))

    def read(self) -> list[str]:
        state: Any = self.collector.state().state["store"]
        return state["shards"]


def test_an_episode_counts_as_read_once_its_update_is_done() -> None:
    parts = Collecting()
    parts.arrive(0)
    first, _ = parts.collector.gather(0)
    assert parts.read() == []
    parts.collector.undo()
    parts.arrive(1)
    again, _ = parts.collector.gather(0)
    assert again.rewards.equal(first.rewards), "an update that is undone gets the same episodes"
    parts.collector.update_weights([], 1)
    assert parts.read() == ["shard-0"]
    second, metrics = parts.collector.gather(1)
    assert second.rewards.sum() == 4 + 5 + 6 + 7 and metrics["rollout/episodes"] == 1
    assert parts.read() == ["shard-0"]
    parts.collector.update_weights([], 2)
    parts.collector.load_state(parts.collector.state(), 2)
    assert parts.reader.restored is not None and parts.reader.restored.texts("shards") == ["shard-0", "shard-1"]


def test_an_iteration_waits_for_as_many_steps_as_a_rollout_has_until_the_run_is_to_stop() -> None:
    parts = Collecting()
    demos = recorded([3], [True])
    parts.reader.arriving.append(ShardPart("short", ["a"], demos))
    parts.reader.poll = lambda most: setattr(parts, "stopped", True)  # type: ignore[method-assign,assignment]
    with pytest.raises(InterruptedError):
        parts.collector.gather(0)
    assert parts.read() == [], "what waits is read again after a restart"


RULE = "training-from-a-store-is-possible"


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("store.url", ("algorithm=dagger",)),
        ("rollout.publish_weights", ("rollout.publish_weights=true",)),
        ("algorithm.group_size", ("algorithm.group_size=2",)),
        ("rollout.pipeline_stages", ("rollout.pipeline_stages=2", "env.num_processes=2")),
        ("env.enable_offload", ("env.enable_offload=true",)),
        ("reward.fn", ("reward.fn=math:isfinite",)),
        ("env.reward_mode", ("env.reward_mode=potential", "model.num_action_chunks=2")),
    ],
)
def test_what_a_run_from_a_store_would_ignore_is_refused(key: str, settings: tuple[str, ...]) -> None:
    base = ("env=toy", "model=mlp", "algorithm=sac", "env.state=full", "store.url=store")
    assert load_config([*base], verb="train").config.store_url == "store"
    with pytest.raises(ConfigError) as caught:
        load_config([*base, *settings], verb="train")
    assert (key, RULE) in [(problem.key, problem.code) for problem in caught.value.problems]


def problems_of(*settings: str) -> list[tuple[str, str]]:
    try:
        load_config(list(settings), verb="train")
    except ConfigError as error:
        return [(problem.key, problem.code) for problem in error.problems]
    return []


def test_a_robot_is_learned_from_where_no_update_makes_it_wait() -> None:
    robot = ("env=robot_sim", "model=mlp", "env.state=full")
    assert ("env.real_time.control_hz", "robot-would-wait") in problems_of(*robot, "algorithm=sac")
    assert problems_of(*robot, "algorithm=sac", "store.url=store") == []
    joined = problems_of(*robot, "algorithm=ppo_gaussian", "store.url=store")
    assert ("env.real_time.control_hz", "robot-would-wait") in joined


def test_a_trainer_beside_a_robot_does_not_evaluate() -> None:
    robot = ("env=robot", "env.robot=so101_follower", "env.instruction=go", "model=mlp", "algorithm=sac")
    robot += ("store.url=store", "env.real_time.control_hz=10", "env.num_processes=1", "env.train.total_num_envs=1")
    found = problems_of(*robot)
    assert {("runner.eval_interval", RULE), ("runner.eval_at_start", RULE)} <= set(found)
    quiet = [
        *robot,
        "runner.eval_interval=0",
        "runner.eval_at_start=false",
        "env.action_low=[-1]",
        "env.action_high=[1]",
    ]
    quiet += ["model.action_dim=1", "env.success_fn=math:isfinite"]
    own = load_config(quiet, verb="train").config
    assert Schedule.of_training(own).evaluations_after(0) == 0
    alone = own.model_copy(update={"store": None})
    assert Schedule.of_training(alone).evaluations_after(0) == 1


def test_a_checked_file_of_collectors_and_of_a_trainer_that_imitates_has_a_store_of_its_own() -> None:
    assert load_config(["experiment=hybrid", "store.url=store"]).config.store_url == "store"
    assert load_config(["env=toy"]).config.store_url is None


def test_a_run_is_resumed_with_its_store_alone() -> None:
    before = config()
    refuse_impossible(before, to_yaml(before, None))
    with pytest.raises(ConfigError) as caught:
        refuse_impossible(config("store.url=other"), to_yaml(before, None))
    assert [(problem.key, problem.code) for problem in caught.value.problems] == [("store.url", "settings-fixed")]
