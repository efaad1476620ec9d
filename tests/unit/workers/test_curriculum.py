"""Episodes that begin within demonstrations, on the toy environment in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expect import raises_code
from test_starts import NUM_ENVS, Worker, check_resume, config_of, iterate

from embodrl.config.schema import CurriculumConfig
from embodrl.data.demos import DemoEpisode, Outcomes
from embodrl.data.raw import RawWriter
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.errors import CheckpointError, ConfigError, EmbodrlError
from embodrl.workers.curriculum import Curriculum, Demonstration, load_curriculum

LIMIT = 12
TASKS = ("reach-red", "reach-green")


def toy(num_envs: int = 1, **settings: Any) -> ToyVectorEnv:
    return ToyVectorEnv(
        num_envs, image_size=8, max_episode_steps=LIMIT, include_state=True, auto_reset=False, **settings
    )


def demonstrate(seed: int, task: int) -> DemoEpisode:
    """The expert, slowly, until success."""
    env = toy()
    seen = env.reset(np.array([seed]), np.array([task], np.int32), np.array([0]))
    states, actions = [], []
    while True:
        action = 0.7 * env.expert_actions()
        states.append(seen.state[0])
        actions.append(action[0])
        step = env.chunk_step(action[None], np.ones(1, np.bool_))
        seen = step.observation
        if step.done[0]:
            break
    length = len(actions)
    ended = np.arange(length) == length - 1
    executed = np.array(actions, np.float32)
    images = np.zeros((length, 1, 8, 8, 3), np.uint8)
    outcomes = Outcomes(executed, np.zeros(length, np.float32), ended)
    success = bool(step.success[0])
    return DemoEpisode(images, np.array(states), executed, "go", TASKS[task], seed, success, outcomes)


@pytest.fixture(scope="module")
def episodes() -> list[DemoEpisode]:
    """Three demonstrations of at least six steps."""
    made = (demonstrate(seed, seed % 2) for seed in range(1000))
    return [each for each in made if len(each.actions) >= 6 and each.success][:3]


def write(directory: Path, episodes: list[DemoEpisode]) -> str:
    writer = RawWriter(directory)
    for each in episodes:
        writer.add(each)
    writer.close({"robot_type": "toy"})
    return f"env.train.start_from_demos={directory}"


SETTINGS = (f"env.max_episode_steps={LIMIT}", f"env.train.max_steps_per_rollout_epoch={LIMIT}")


def worker_of(directory: Path, episodes: list[DemoEpisode], *settings: str) -> Worker:
    return Worker(config_of(*SETTINGS, write(directory, episodes), *settings))


@pytest.mark.parametrize("reward", ["dense_delta", "potential"])
def test_a_repeated_prefix_leads_to_the_very_state(episodes: list[DemoEpisode], reward: str) -> None:
    demo = episodes[0]
    seeds, tasks = np.array([5, demo.seed]), np.array([0, TASKS.index(demo.task)], np.int32)
    found, expected = toy(2), toy(2)
    for env in (found, expected):
        env.reset(seeds, tasks, np.arange(2))
        if reward == "potential":
            env.rules = type(env.rules)(LIMIT, reward, auto_reset=False)
    prefix = demo.actions[:3]
    for action in prefix:
        actions = np.stack([np.zeros(7, np.float32), action])[:, None]
        expected.chunk_step(actions, np.array([False, True]))
    answer = found.call("set_row_state", {"row": 1, "state": {"replay": prefix}})
    assert answer == {"steps": 3, "ended": False}
    for row in range(2):
        left, right = found.get_row_state(row), expected.get_row_state(row)
        assert left.pop("_returned") == 0
        right.pop("_returned")
        np.testing.assert_equal(left, right)
    np.testing.assert_array_equal(found.get_row_state(1)["_state"], demo.state[3])
    assert found.get_row_state(1)["_elapsed"] == 3


def test_an_episode_that_is_solved_on_the_way_begins_again(episodes: list[DemoEpisode]) -> None:
    demo = episodes[0]
    env, fresh = toy(ignore_terminations=True), toy(ignore_terminations=True)
    for each in (env, fresh):
        each.reset(np.array([demo.seed]), np.array([TASKS.index(demo.task)], np.int32), np.array([0]))
    actions = np.concatenate([demo.actions, demo.actions])
    assert env.set_row_state(0, {"replay": actions}) == {"steps": len(demo.actions), "ended": True}
    np.testing.assert_equal(env.get_row_state(0), fresh.get_row_state(0))


def test_rollouts_begin_in_demonstrations_and_train_on_what_follows(tmp_path: Path, episodes: Any) -> None:
    worker = worker_of(tmp_path / "demos", episodes, "env.train.auto_reset=false")
    batch, metrics = worker.gather(0)
    (began,) = worker.began
    assert len(began.prefixes) == NUM_ENVS // 2
    by_seed = {each.seed: each for each in episodes}
    for row, prefix in began.prefixes.items():
        demo = by_seed[int(began.seeds[row])]
        start = len(demo.actions) - 4
        np.testing.assert_array_equal(prefix, demo.actions[:start])
        assert TASKS.index(demo.task) == began.tasks[row]
        np.testing.assert_array_equal(batch.forward_inputs["seen"][0, row], demo.state[start])
        num_steps = int(batch.valid[:, row].sum())
        solved = batch.success is not None and bool(batch.success[:, row].any())
        assert solved or num_steps == LIMIT - start, "the step limit counts from the reset"
    repeated = sum(map(len, began.prefixes.values()))
    assert batch.meta["env_steps"] == int(batch.valid.sum()) + repeated
    lengths = [len(each.actions) for each in episodes]
    assert worker.starts.curriculum is not None
    starts = [demo.start for demo in worker.starts.curriculum.demos]
    assert metrics["curriculum/mean_start"] == pytest.approx(np.mean(np.array(starts) / lengths))
    assert metrics["curriculum/solved"] == 0
    plain = set(range(NUM_ENVS)) - began.prefixes.keys()
    seeds, _ = worker.schedule.draw(0, 0)
    assert all(began.seeds[row] == seeds[row] for row in plain)


def test_a_curriculum_resumes_to_the_bit(tmp_path: Path, episodes: Any) -> None:
    moving = ("env.train.curriculum.window=1", "env.train.curriculum.success_rate=0", "env.train.curriculum.step=2")
    config = config_of(*SETTINGS, write(tmp_path / "demos", episodes), *moving, "env.train.failed_seed_fraction=0.25")
    check_resume(config)
    worker = Worker(config)
    iterate(worker, range(12))
    assert worker.starts.metrics()["curriculum/solved"] == 1, "every outcome moves a start back"
    assert not worker.began[-1].prefixes
    assert worker.gather(12)[1]["curriculum/mean_start"] == 0
    other = worker_of(tmp_path / "others", episodes[:2])
    with raises_code("checkpoint-other-settings", CheckpointError):
        other.load_state(worker.state(), 1)


def test_the_start_moves_back_when_enough_of_the_last_episodes_succeed() -> None:
    demo = Demonstration(7, 0, np.zeros((10, 7), np.float32), np.zeros((10, 0), np.float32), 4)
    curriculum = Curriculum([demo], CurriculumConfig(step=3, window=2, success_rate=0.5))
    for start, success, wanted in (
        (4, False, 4),  # one of two is missing
        (4, False, 4),
        (3, True, 4),  # begun elsewhere
        (4, True, 1),
        (4, True, 1),  # begun before the start moved
        (1, True, 1),
        (1, True, 0),
        (0, True, 0),
    ):
        curriculum.learn(0, start, success)
        assert demo.start == wanted
    assert not demo.done
    curriculum.learn(0, 0, False)
    assert demo.done and curriculum.draw(np.random.default_rng(0), 4) == []
    demo.start = 9
    curriculum.cut(0, 6)
    assert demo.start == 3


@pytest.mark.parametrize("lack", ["outcomes", "seeds", "task", "dimensions", "evaluation", "success", "state"])
def test_demonstrations_that_cannot_be_repeated_are_refused(tmp_path: Path, episodes: Any, lack: str) -> None:
    demo: DemoEpisode = episodes[0]
    changed: dict[str, dict[str, Any]] = {
        "outcomes": {"outcomes": None},
        "seeds": {"seed": None},
        "task": {"task": "reach-blue"},
        "dimensions": {"outcomes": Outcomes(demo.actions[:, :3], *_rest(demo))},
        "evaluation": {"seed": 1_000_000},
        "success": {"success": False},
        "state": {"outcomes": Outcomes(-demo.actions, *_rest(demo))},
    }
    broken = DemoEpisode(**{**vars(demo), **changed[lack]})
    with raises_code("demos-not-repeatable", EmbodrlError):
        worker_of(tmp_path / "demos", [broken]).gather(0)


def _rest(demo: DemoEpisode) -> tuple[Any, Any]:
    assert demo.outcomes is not None
    return demo.outcomes.rewards, demo.outcomes.terminated


def test_without_demonstrations_there_is_no_curriculum() -> None:
    config = config_of()
    assert load_curriculum(config, toy().spec) is None


@pytest.mark.parametrize("setting", ["env.train.start_from_demos=nowhere", "algorithm=branch"])
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, setting: str) -> None:
    source = "" if "nowhere" in setting else f"env.train.start_from_demos={tmp_path}"
    with pytest.raises(ConfigError, match="start_from_demos"):
        config_of(*filter(None, (setting, source)))
