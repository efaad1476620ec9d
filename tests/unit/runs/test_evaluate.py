import hashlib
import itertools

import numpy as np
import pytest
import torch
from expect import raises_code
from toy_policy import ToyPolicy

from embodrl.config import load_config
from embodrl.data.rng import draw_rows
from embodrl.envs.pool.local import LocalPool
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.processes.frames import PeerGoneError
from embodrl.types import PolicyOutput
from embodrl.workers.evaluator import MAX_ATTEMPTS, Evaluator, evaluation_result, join_results, run_decodings

CONFIG = load_config(
    [
        "env=toy",
        "env.tasks=[reach-red,reach-green]",
        "env.max_episode_steps=6",
        "env.train.total_num_envs=4",
        "env.train.max_steps_per_rollout_epoch=12",
        "env.eval.total_num_envs=4",
        "env.eval.num_episodes=10",
        "env.eval.seed=70",
        "model.num_action_chunks=2",
        "model.warm_start=null",
        "actor.global_batch_size=8",
        "actor.micro_batch_size=8",
    ]
).config


class ToyPool(LocalPool):
    """A record of what was asked of it."""

    def __init__(self, make=ToyVectorEnv, begin=True, **kwargs):
        settings = {"num_envs": 4, "image_size": 8, "max_episode_steps": 6, "include_state": True}
        super().__init__(make, settings | kwargs, max_restarts=100)
        self.calls, self.resets = [], []
        if begin:
            self.start()

    @property
    def env(self):
        return self.envs[0]

    def call(self, method, arguments=None, *, restart=False):
        self.calls.append((method, arguments or {}))
        return super().call(method, arguments, restart=restart)

    def reset(self, seeds, task_ids, indices=None, *, copy=False):
        self.resets.append((seeds.tolist(), task_ids.tolist()))
        return super().reset(seeds, task_ids, indices, copy=copy)


class Expert:
    """Solves the red task only, and looks no further than to the rows that it is asked about."""

    decodings = ("greedy",)

    def __init__(self, pool):
        self.pool, self.offloads = pool, 0

    def offload(self):
        self.offloads += 1

    def decide(self, observation, decoding, generators=None):
        rows = [int(np.flatnonzero((self.pool.env.position == state).all(axis=1))[0]) for state in observation.state]
        best = self.pool.env.expert_actions()[rows] * (observation.task_id == 0)[:, None]
        return PolicyOutput(np.repeat(best[:, None], 2, axis=1), None, None, {})


def test_episode_i_has_its_seed_and_task_and_success_is_counted_by_task():
    pool = ToyPool()
    done = []
    expert = Expert(pool)
    result = Evaluator(CONFIG, pool, expert).run(progress=lambda number, text: done.append(number))
    assert expert.offloads == 1
    assert pool.resets == [
        ([70, 71, 72, 73], [0, 1, 0, 1]),
        ([74, 75, 76, 77], [0, 1, 0, 1]),
        ([78, 79, 79, 79], [0, 1, 1, 1]),  # a short wave: the rest is not counted
    ]
    assert done == [4, 8, 10]
    assert result.episodes == 10 and len(result.successes) == 10
    red, green = result.successes[::2], result.successes[1::2]
    assert result.per_task == {"reach-red": np.mean(red), "reach-green": np.mean(green)}
    assert result.success_rate == pytest.approx(np.mean(result.successes))
    assert sum(red) > sum(green)
    metrics = result.metrics()
    assert metrics["eval/success_rate"] == result.success_rate
    assert metrics["eval/reach-red/success_rate"] == np.mean(red)


def test_what_follows_an_evaluation_does_not_depend_on_it():
    pool = ToyPool()
    Evaluator(CONFIG, pool, Expert(pool)).run()
    assert pool.calls[0][0] == "rebuild"
    assert pool.calls[-2:] == [("set_auto_reset", {"value": True}), ("rebuild", {})]
    assert ("set_auto_reset", {"value": False}) in pool.calls


class Still:
    """Does nothing."""

    decodings = ("greedy",)

    def offload(self):
        pass

    def decide(self, observation, decoding, generators=None):
        return PolicyOutput(np.zeros((len(observation.task_id), 2, 7), np.float32), None, None, {})


def own_pool(**differs) -> ToyPool:
    """Return a pool for one evaluation, of one task."""
    return ToyPool(begin=False, tasks=["reach-green"], **differs)


HELD_OUT = CONFIG.model_copy(
    update={
        "env": CONFIG.env.model_copy(update={"eval": CONFIG.env.eval.model_copy(update={"tasks": ("reach-green",)})})
    }
)


def test_held_out_tasks_are_played_in_a_pool_of_their_own():
    pool, made = ToyPool(), []

    def make_own(config):
        assert config.env.tasks == ("reach-green",)
        made.append(own_pool())
        return made[-1]

    def lost(number, text):  # a fault there is one of the run
        made[-1].faults.restarts += 1

    evaluator = Evaluator(HELD_OUT, pool, Still(), make_own=make_own)
    for number in (1, 2):
        result = evaluator.run(progress=lost)
        assert {record.task for record in result.records} == {"reach-green"} and result.episodes == 10
        assert len(made) == number and made[-1].envs == []
    assert made[0].resets[0] == ([70, 71, 72, 73], [0, 0, 0, 0])
    assert pool.calls == [] and pool.resets == [] and pool.faults.restarts == 2 * 3  # once a wave
    assert evaluator.pool is pool


def test_a_pool_of_its_own_shows_what_the_policy_has_learnt_to_see():
    pool, own = ToyPool(), own_pool(include_state=False)
    with raises_code("evaluation-differs"):
        Evaluator(HELD_OUT, pool, Still(), make_own=lambda config: own).run()
    assert own.envs == []


def test_two_evaluations_agree():
    pool = ToyPool()
    evaluator = Evaluator(CONFIG, pool, Expert(pool))
    first, second = evaluator.run(), evaluator.run()
    assert first.successes == second.successes and first.mean_return == second.mean_return


def test_a_stop_ends_it_between_two_chunks():
    pool = ToyPool()
    answers = iter([False, False, True])
    with pytest.raises(InterruptedError):
        Evaluator(CONFIG, pool, Expert(pool), should_stop=lambda: next(answers)).run()
    assert pool.calls[-1] == ("rewind", {})


def test_a_late_stop_leaves_no_request_in_progress():
    pool = ToyPool()
    drained = []
    pool.requests.drain = lambda: drained.append(len(pool.calls))

    class Late(Expert):
        def decide(self, observation, decoding, generators=None):
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        Evaluator(CONFIG, pool, Late(pool)).run()
    assert drained == [len(pool.calls)]


def failing_pool(doomed: list[int], times: int) -> ToyPool:
    """Return a pool whose process dies at the first chunk of episodes with these seeds, so many times: all four end."""
    deaths = itertools.count()

    class Failing(ToyVectorEnv):
        def chunk_step(self, actions, active):
            if self.episode_seed.tolist() == doomed and not self._elapsed.any() and next(deaths) < times:
                raise PeerGoneError
            return super().chunk_step(actions, active)

    return ToyPool(Failing)


SECOND_WAVE = [74, 75, 76, 77]


def test_episodes_that_a_fault_has_ended_are_played_again(caplog):
    whole, pool = ToyPool(), failing_pool(SECOND_WAVE, MAX_ATTEMPTS - 1)
    done = []
    expected = Evaluator(CONFIG, whole, Expert(whole)).run()
    result = Evaluator(CONFIG, pool, Expert(pool)).run(progress=lambda number, text: done.append(number))
    assert result.records == expected.records and result.lost_episodes == 0
    assert done == [4, 4, 6, 6, 10]
    assert pool.resets[3:] == [(SECOND_WAVE, [0, 1, 0, 1])] * 2
    assert "4 episodes came to no result, and are run again" in caplog.text


def test_episodes_that_a_fault_ends_each_time_are_left_out():
    whole, pool = ToyPool(), failing_pool(SECOND_WAVE, 100)
    expected = Evaluator(CONFIG, whole, Expert(whole)).run()
    result = Evaluator(CONFIG, pool, Expert(pool)).run()
    assert pool.faults.restarts == MAX_ATTEMPTS
    played = expected.successes[:4] + expected.successes[8:]
    assert result.successes == played and len(played) == 6
    assert (result.episodes, result.lost_episodes) == (6, 4)
    assert result.success_rate == pytest.approx(np.mean(played))
    assert result.per_task == {"reach-red": np.mean(played[::2]), "reach-green": np.mean(played[1::2])}
    metrics = result.metrics()
    assert (metrics["eval/episodes"], metrics["eval/lost_episodes"]) == (6, 4)
    assert expected.metrics()["eval/lost_episodes"] == 0


def test_an_evaluation_that_lost_everything_has_no_rate():
    pool = failing_pool([70, 71, 72, 73], 100)
    short = CONFIG.env.eval.model_copy(update={"num_episodes": 4})
    config = CONFIG.model_copy(update={"env": CONFIG.env.model_copy(update={"eval": short})})
    result = Evaluator(config, pool, Expert(pool)).run()
    assert (result.episodes, result.lost_episodes, result.per_task) == (0, 4, {})
    assert np.isnan(result.success_rate) and np.isnan(result.mean_return)


class Fickle(Expert):
    """Solves its task, and runs from the goal afterwards where the seed is even."""

    def decide(self, observation, decoding, generators=None):
        rows = [int(np.flatnonzero((self.pool.env.position == state).all(axis=1))[0]) for state in observation.state]
        leaves = self.pool.env._solved & (self.pool.env.episode_seed % 2 == 0)
        actions = np.where(leaves[:, None], np.eye(7, dtype=np.float32)[0], self.pool.env.expert_actions())[rows]
        return PolicyOutput(np.repeat(actions[:, None], 2, axis=1), None, None, {})


def evaluate_fickle(to_step_limit: bool):
    section = CONFIG.env.model_copy(
        update={"max_episode_steps": 40, "eval": CONFIG.env.eval.model_copy(update={"to_step_limit": to_step_limit})}
    )
    pool = ToyPool(max_episode_steps=40)
    config = CONFIG.model_copy(update={"env": section})
    return Evaluator(config, pool, Fickle(pool)).run(), pool


def test_success_at_the_end_is_another_figure_where_episodes_go_on():
    result, pool = evaluate_fickle(to_step_limit=True)
    assert result.success_rate == 1.0 and all(record.length == 40 for record in result.records)
    assert [record.success_at_end for record in result.records] == [record.seed % 2 == 1 for record in result.records]
    assert result.success_at_end == 0.5
    assert ("set_ignore_terminations", {"value": False}) in pool.calls[-3:]  # as it was before
    ended, pool = evaluate_fickle(to_step_limit=False)
    assert ended.success_rate == ended.success_at_end == 1.0 and max(r.length for r in ended.records) < 40
    assert not any(name in ("solved_now", "set_ignore_terminations") for name, _ in pool.calls)


def test_an_environment_that_does_not_tell_leaves_the_end_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ToyVectorEnv, "solved_now", lambda self: None)
    result, _ = evaluate_fickle(to_step_limit=True)
    assert {record.success_at_end for record in result.records} == {None} and np.isnan(result.success_at_end)


def test_the_first_picture_of_each_task_is_identified():
    pool = ToyPool()
    found = Evaluator(CONFIG, pool, Expert(pool)).run().first_pictures
    images = pool.reset(np.array([70, 71, 72, 73]), np.array([0, 1, 0, 1], np.int32)).images
    names = ("reach-red", "reach-green")
    assert found == {name: hashlib.sha256(images[row].tobytes()).hexdigest() for row, name in enumerate(names)}


class Drawing(ToyPolicy):
    """Goes one way by its most probable action, the other way by its mean, and anywhere by a sample."""

    draws_by_row = True
    decodings = ("greedy", "sampled", "mean")

    def predict_action_batch(self, observation, mode, sampling, generator=None, compute_values=True):
        shape = (observation.batch_size, 2, 7)
        actions = torch.full(shape, {"eval": -0.5, "mean": 0.5}.get(mode, 0.0))
        if mode == "train":
            actions = draw_rows(lambda size, one: 2 * torch.rand(size, generator=one) - 1, shape, generator)
        return PolicyOutput(actions.numpy(), torch.zeros(shape), None, {})


def drawing_engine():
    return NativeRolloutEngine(Drawing(2, 7), CONFIG.rollout, CONFIG.algorithm.sampling, seed=3, num_threads=2)


def decoded_by(decoding, on_the_way="greedy"):
    chosen = {"decoding": decoding, "decoding_on_the_way": on_the_way}
    env = CONFIG.env.model_copy(update={"eval": CONFIG.env.eval.model_copy(update=chosen)})
    return CONFIG.model_copy(update={"env": env})


def test_each_decoding_plays_the_same_episodes_and_leaves_the_random_state_of_training():
    pool, engine, done = ToyPool(), drawing_engine(), []
    before = engine.random_state()
    evaluator = Evaluator(CONFIG, pool, engine)
    result = evaluator.run(progress=lambda number, text: done.append(number))
    assert engine.random_state() == before
    assert evaluator.decodings == ("greedy", "sampled", "mean") == tuple(result.by_decoding)
    assert pool.resets == 3 * pool.resets[:3] and done == [4, 8, 10, 14, 18, 20, 24, 28, 30]
    returns = [[record.episode_return for record in one.records] for one in result.by_decoding.values()]
    assert returns[0] != returns[1] != returns[2] != returns[0]
    metrics = result.metrics()
    assert metrics["eval/success_rate"] == result.success_rate and metrics["eval/episodes"] == 10
    for name in ("sampled", "mean"):
        assert metrics[f"eval/success_rate_{name}"] == result.decodings[name].success_rate
    assert metrics["time/eval_s"] == pytest.approx(sum(one.env_s + one.policy_s for one in result.by_decoding.values()))


@pytest.mark.parametrize("on_the_way", ["greedy", "sampled", "mean"])
def test_evaluations_on_the_way_play_what_those_at_the_ends_begin_with(on_the_way):
    config, engine = decoded_by("all", on_the_way), drawing_engine()
    evaluator = Evaluator(config, ToyPool(), engine)
    every, one = (
        evaluator.run(decodings=run_decodings(config, engine, every_decoding)) for every_decoding in (True, False)
    )
    assert one.decoding == every.decoding == on_the_way and one.decodings == {}
    assert set(every.by_decoding) == {"greedy", "sampled", "mean"}
    assert one.records == every.records and one.first_pictures == every.first_pictures
    found = every.metrics()
    rates = {name.rpartition("_")[2] for name in found if name.startswith("eval/success_rate_")}
    assert rates == {"sampled", "mean"} | ({"greedy"} if on_the_way != "greedy" else set())
    assert one.metrics()["eval/success_rate"] == found["eval/success_rate"]


@pytest.mark.parametrize(
    ("decoding", "on_the_way", "every", "one"),
    [
        ("all", "all", ("greedy", "sampled", "mean"), ("greedy", "sampled", "mean")),
        ("all", "sampled", ("sampled", "greedy", "mean"), ("sampled",)),
        ("mean", "greedy", ("mean",), ("mean",)),
    ],
)
def test_the_decoding_on_the_way_is_chosen_among_all(decoding, on_the_way, every, one):
    config = decoded_by(decoding, on_the_way)
    assert run_decodings(config, drawing_engine(), True) == every
    assert run_decodings(config, drawing_engine(), False) == one


def test_what_is_sampled_does_not_depend_on_who_plays_it_or_after_what():
    whole = Evaluator(CONFIG, ToyPool(), drawing_engine()).run().decodings["sampled"]
    evaluator = Evaluator(decoded_by("sampled"), ToyPool(), drawing_engine())
    parts = [evaluator.run_episodes(part) for part in np.array_split(np.arange(10), 2)[::-1]]  # as of two processes
    found = evaluation_result(CONFIG, join_results(parts[::-1], max))
    assert found.records == whole.records and found.decodings == {} and found.decoding == "sampled"
    assert found.metrics()["eval/success_rate_sampled"] == found.success_rate


def test_a_decoding_that_the_policy_lacks_is_refused():
    engine = drawing_engine()
    engine.policy.decodings = ("greedy", "sampled")
    assert Evaluator(decoded_by("all"), ToyPool(), engine).decodings == ("greedy", "sampled")
    with raises_code("policy-has-no-decoding"):
        Evaluator(decoded_by("mean"), ToyPool(), engine)
    with raises_code("policy-has-no-decoding"):
        run_decodings(decoded_by("all", "mean"), engine, True)
