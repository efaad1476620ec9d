"""Rollouts of a store: the oldest are taken, each once, and who joined is told how many may wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expect import raises_code

from embodrl.config import load_config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import ConfigError, StoreError, UsageError
from embodrl.fields import Fields
from embodrl.store.config import store_settings
from embodrl.store.join import Spool, load_joined
from embodrl.store.rollout_shards import ROLLOUTS, SETTINGS, Demand, Ledger, SharedRollout, put_run, removable
from embodrl.store.shared_rollouts import SharedRollouts, rollout_settings
from embodrl.store.store import Store
from embodrl.trainer.settings import approved
from embodrl.workers.collector import RolloutState
from embodrl.workers.outcomes import EpisodeStats
from embodrl.workers.play import Seconds
from embodrl.workers.reward import RewardWorker, _outcome

BASE = ("env=toy", "model=mlp", "algorithm=ppo_gaussian", "env.state=full", "env.tasks=[reach-red]")
SMALL = ("env.train.total_num_envs=4", "env.num_processes=1", "store.poll_s=0.001", "runner.save_interval=1")
BATCH = ("actor.global_batch_size=200", "actor.micro_batch_size=200")
ROWS = 2


def config(*settings: str) -> Any:
    return load_config([*BASE, *SMALL, *BATCH, "store.url=store", *settings], verb="train").config


def rollout(
    collector: str, number: int, began: int, value: float, rows: int = ROWS, newest: int | None = None
) -> SharedRollout:
    """Three steps in each environment, all of whose rewards are ``value``, in one group; the last by ``newest``."""
    there = torch.ones(3, rows, 1, dtype=torch.bool)
    action_dim = config().model.action_dim
    versions = torch.full((3, rows), began)
    versions[-1] = began if newest is None else newest
    batch = TrajectoryBatch.from_rollout(
        forward_inputs={"state": torch.zeros(3, rows, 2)},
        final_inputs={"state": torch.zeros(3, rows, 2)},
        values=torch.zeros(4, rows, 1),
        bootstrap_values=torch.zeros(3, rows, 1),
        rewards=torch.full((3, rows, 1), value),
        logprobs=torch.zeros(3, rows, 1, action_dim),
        valid=there,
        terminated=~there,
        truncated=~there,
        policy_version=versions,
        task_id=torch.zeros(3, rows, dtype=torch.int64),
        group_id=torch.zeros(3, rows, dtype=torch.int64),
        success=torch.zeros(3, rows, dtype=torch.bool),
        meta={"env_steps": 3 * rows, "episodes": EpisodeStats().as_dict(), "seconds": dict(vars(Seconds()))},
    )
    return SharedRollout(collector, number, began, batch)


class Run:
    """A trainer's collector over a store in a directory."""

    def __init__(self, directory: Path, *settings: str) -> None:
        self.config = config(*settings)
        self.store = Store(str(directory / "store"))
        self.store.create()
        self.directory = directory
        self.stopped = False
        self.restart(0)

    def restart(self, version: int) -> None:
        def update_weights(weights: object, version: int) -> None:
            engine.version = version

        engine: Any = SimpleNamespace(version=version, update_weights=update_weights)
        weights: Any = SimpleNamespace(store=self.store, catch_up=lambda: setattr(self, "stopped", True))
        self.rewards = RewardWorker(self.config, ("reach-red",))
        self.collector = SharedRollouts(
            self.config, engine, self.directory / "copies", weights, self.rewards, lambda: self.stopped
        )

    def arrive(self, *rollouts: SharedRollout, settings: dict[str, object] | None = None) -> None:
        for one in rollouts:
            spool = Spool(self.store, self.directory / "spool" / one.collector, one.collector)
            spool.add(one, rollout_settings(self.config) if settings is None else settings)
            spool.upload()

    def values(self) -> list[float]:
        """The values of an update's rollouts, in the order of the batch."""
        batch, _ = self.collector.gather(0)
        return batch.rewards[0, ::ROWS, 0].tolist()

    def counted(self) -> dict[str, object]:
        return self.collector.state().state["ledger"]  # type: ignore[no-any-return]


def test_the_oldest_are_taken_and_count_once_their_update_is_done(tmp_path: Path) -> None:
    run = Run(tmp_path, "runner.max_staleness=1", "algorithm.decoupled.enabled=true")
    run.arrive(rollout("b", 0, 1, 3.0), rollout("a", 0, 0, 1.0), rollout("a", 1, 0, 2.0))
    batch, metrics = run.collector.gather(0)
    assert batch.rewards[0, :, 0].tolist() == [1.0, 1.0, 2.0, 2.0] and batch.meta["env_steps"] == 12
    assert batch["group_id"][0].tolist() == [0, 0, 1, 1], "groups of two rollouts stay apart"
    assert metrics["staleness/queue"] == 0, "what an update does not need is not read"
    assert run.counted() == {}
    run.collector.undo()
    assert run.values() == [1.0, 2.0], "an update that is undone gets the same rollouts"
    run.collector.update_weights([], 1)
    assert run.counted() == {"a": {"next": 2, "open": []}}
    run.arrive(rollout("b", 1, 1, 4.0))
    assert run.values() == [3.0, 4.0]
    saved = run.collector.state()
    run.restart(1)
    run.collector.load_state(saved, 1)
    assert run.values() == [3.0, 4.0], "what no update has taken is read again"


def test_what_is_too_old_or_of_weights_that_were_never_made_counts_as_steps_alone(tmp_path: Path) -> None:
    run = Run(tmp_path)  # max_staleness=0
    run.restart(3)
    run.arrive(rollout("a", 0, 2, 1.0), rollout("a", 1, 3, 2.0), rollout("b", 0, 4, 3.0), rollout("b", 1, 3, 4.0))
    batch, metrics = run.collector.gather(0)
    assert batch.rewards[0, ::ROWS, 0].tolist() == [2.0, 4.0]
    assert metrics["staleness/rejected_shards"] == 1 and batch.meta["env_steps"] == 12 + 6
    run.stopped = True
    run.collector.update_weights([], 4)
    assert run.counted() == {"a": {"next": 2, "open": []}, "b": {"next": 2, "open": [0]}}
    run.stopped = False
    run.arrive(rollout("a", 2, 4, 5.0))
    assert run.values() == [3.0, 5.0], "weights of that version have been made since"


def test_a_run_that_is_to_stop_waits_no_longer(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.arrive(rollout("a", 0, 0, 1.0))
    with pytest.raises(InterruptedError):
        run.collector.gather(0)
    assert run.counted() == {}


def test_rollouts_that_were_made_with_other_settings_are_rejected(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.arrive(rollout("a", 0, 0, 1.0), settings=rollout_settings(config("env.max_episode_steps=7")))
    run.arrive(rollout("b", 0, 0, 2.0), rollout("b", 1, 0, 3.0))
    batch, _ = run.collector.gather(0)
    assert batch.rewards[0, ::ROWS, 0].tolist() == [2.0, 3.0] and batch.meta["env_steps"] == 12 + 6
    assert run.counted() == {"a": {"next": 1, "open": []}}


def test_rollouts_of_several_sizes_add_up_to_an_update_or_take_no_room(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.arrive(rollout("a", 0, 0, 1.0, rows=3), rollout("b", 0, 0, 2.0, rows=3))
    with pytest.raises(InterruptedError):
        run.collector.gather(0)
    demand = Demand.of(run.store)
    assert demand is not None and demand.room == 4 + 6 and demand.has_room(run.store, 0)
    run.stopped = False
    run.arrive(rollout("c", 0, 0, 3.0, rows=1))
    batch, _ = run.collector.gather(0)
    assert sorted(batch.rewards[0, :, 0].tolist()) == [1.0, 1.0, 1.0, 3.0]


def test_an_update_that_asks_for_more_makes_room_for_it(tmp_path: Path) -> None:
    run = Run(tmp_path)  # max_staleness=0: the rollouts of an update take all the room
    run.arrive(*(rollout("a", number, 0, float(number)) for number in range(2)))
    run.collector.gather(0)
    with pytest.raises(InterruptedError):
        run.collector.gather_more(0, 1, 4)
    demand = Demand.of(run.store)
    assert demand is not None and demand.has_room(run.store, 0)
    run.stopped = False
    run.arrive(*(rollout("b", number, 0, float(number)) for number in range(2)))
    more, _ = run.collector.gather_more(0, 1, 4)
    assert more.batch_size[1] == 4 and more["group_id"].min() == 2, "groups of one update are all different"


def test_a_run_that_went_back_rejects_what_followed_its_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, "runner.max_staleness=1", "algorithm.decoupled.enabled=true")
    run.restart(3)
    run.arrive(rollout("a", 0, 3, 1.0), rollout("a", 1, 3, 2.0, newest=4), rollout("b", 0, 3, 3.0))
    run.collector.resumed()
    assert run.counted() == {"a": {"next": 2, "open": [0]}}
    batch, _ = run.collector.gather(3)
    assert batch.rewards[0, ::ROWS, 0].tolist() == [1.0, 3.0]
    assert batch.meta["env_steps"] == 12 + 6, "what was lost has been simulated, too"


def test_an_outage_while_the_trainer_tells_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.arrive(rollout("a", 0, 0, 1.0))
    put = Demand.put
    outage = StoreError("away", "", code="store-unreachable")

    def fail_once(demand: Demand, store: Store) -> None:
        monkeypatch.setattr(Demand, "put", put)
        raise outage

    monkeypatch.setattr(Demand, "put", fail_once)
    with pytest.raises(InterruptedError):
        run.collector.gather(0)
    assert Demand.of(run.store) is not None, "told again while it waited"


def test_what_a_checkpoint_has_taken_leaves_the_store_but_for_the_newest_of_each(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.arrive(*(rollout("a", number, 0, 1.0) for number in range(3)), rollout("b", 0, 0, 1.0))
    run.collector.gather(0)
    run.collector.update_weights([], 1)
    run.collector.kept()
    with pytest.raises(InterruptedError):
        run.collector.gather(1)
    assert run.store.names(ROLLOUTS) == [f"{ROLLOUTS}/{name}" for name in ("a-000001", "a-000002", "b-000000")]
    demand = Demand.of(run.store)
    assert demand is not None and (demand.version, demand.rows, demand.room, demand.max_staleness) == (1, 4, 4, 0)
    assert demand.ledger.content() == run.counted() == {"a": {"next": 3, "open": []}, "b": {"next": 1, "open": []}}
    for collector, expected in (("a", 3), ("b", 1), ("c", 0)):
        spool = Spool(run.store, tmp_path / "elsewhere", collector)
        assert spool.next_number() == expected, "numbers go on without the directory that made them"


def test_who_joined_may_begin_while_fewer_environments_wait_than_the_bound(tmp_path: Path) -> None:
    run = Run(tmp_path)
    ledger = Ledger()
    ledger.add("a", 0)
    demand = Demand(version=2, rows=4, room=8, max_staleness=1, ledger=ledger)
    assert not demand.has_room(run.store, 0), "its weights are too old"
    assert demand.has_room(run.store, 1)
    # Counted are 2 of a-2, 2 of a-3 and 2 of b-0; a-0 was taken, a-1 is too old, and a-4 is of lost weights.
    run.arrive(*(rollout("a", number, began, 0.0) for number, began in enumerate((1, 0, 1, 2, 3))))
    run.arrive(rollout("b", 0, 2, 0.0))
    assert demand.has_room(run.store, 2)
    assert not demand.has_room(run.store, 1), "it would be too old when two updates have been made before it"
    run.arrive(rollout("b", 1, 2, 0.0))
    assert not demand.has_room(run.store, 2)


def test_rewards_come_with_the_rollouts_that_were_judged(tmp_path: Path) -> None:
    run = Run(tmp_path, "reward.fn=math:isfinite")
    for number in range(2):
        shared = rollout("a", number, 0, 0.0)
        ids = torch.full((3, ROWS), -1)
        ids[-1] = torch.arange(ROWS)
        shared.batch.call_id = ids
        shared.batch.truncated = torch.zeros(3, ROWS, 1, dtype=torch.bool)
        outcomes = [_outcome(torch.tensor(2.0 * number + row), 0) for row in range(ROWS)]
        run.arrive(replace(shared, rewards={"outcomes": outcomes, "waited_s": 1.0}))
    batch, _ = run.collector.gather(0)
    run.rewards.apply(batch)
    assert batch.rewards.sum((0, 2)).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_ledger_by_hand() -> None:
    ledger = Ledger()
    for number in (0, 3, 2):
        ledger.add("a", number)
    assert [ledger.has("a", number) for number in range(5)] == [True, False, True, True, False]
    assert ledger.content() == {"a": {"next": 4, "open": [1]}}
    assert Ledger.read(Fields(ledger.content(), "a checkpoint")) == ledger
    assert not ledger.has("b", 0)
    assert removable(["rollouts/a-000000", "rollouts/a-000001", "rollouts/a-000003"], ledger) == ["rollouts/a-000000"]


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("runner.save_interval", ("runner.save_interval=2",)),
        ("env.train.failed_seed_fraction", ("env.train.failed_seed_fraction=0.5",)),
        ("rollout.pipeline_stages", ("rollout.pipeline_stages=2", "env.num_processes=2")),
        ("rollout.workflow", ("rollout.workflow=two_agents:Pilots", "env.train.auto_reset=false")),
    ],
)
def test_what_does_not_go_with_rollouts_of_others_is_refused(key: str, settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*settings)
    assert (key, "training-from-a-store-is-possible") in [(one.key, one.code) for one in caught.value.problems]


def test_a_run_is_joined_by_its_store_with_its_own_settings(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    with raises_code("store-missing", StoreError):
        load_joined(str(tmp_path), [])
    store.create()
    with raises_code("store-no-run", StoreError):
        load_joined(store.url, [])
    trained = load_config([*BASE, *SMALL, *BATCH, "store.url=/elsewhere", "extensions=[stop_at]"], verb="train")
    put_run(store, approved(trained.to_yaml()))
    here = load_joined(store.url, ["store.collector=left", "env.train.total_num_envs=2"]).config
    assert here.store_url == store.url and here.env.train.total_num_envs == 2
    assert rollout_settings(here) == rollout_settings(trained.config)
    for wrong in ("env.max_episode_steps=7", "env.train.total_num_envs=3"):
        with raises_code("store-other-settings", UsageError):
            load_joined(store.url, [wrong])
    put_run(store, trained.to_yaml())
    again = load_joined(store.url, [], trust=True).config
    assert again.extensions == ("stop_at",)
    assert store_settings(again).spool_dir == store_settings(here).spool_dir, "the run goes on"
    with pytest.raises(ConfigError) as caught:
        load_joined(store.url, [])
    assert [problem.code for problem in caught.value.problems] == ["settings-run-code"]
    store.remove(SETTINGS)
    put_run(store, approved(trained.to_yaml()))
    other = load_joined(store.url, []).config
    assert store_settings(other).spool_dir != store_settings(here).spool_dir, "another run has another spool"


def test_a_run_without_a_store_is_not_joined(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(load_config([*BASE, *SMALL, *BATCH]).to_yaml())
    with raises_code("store-none", UsageError):
        load_joined(str(tmp_path), [])


def test_numbers_of_rollouts_state_round_trip(tmp_path: Path) -> None:
    run = Run(tmp_path)
    content = {"ledger": {"a": {"next": 3, "open": [1]}}, "rejected": 2, "env_steps_dropped": 6}
    run.collector.load_state(RolloutState(dict(content)), 0)
    assert run.collector.state().state == content
