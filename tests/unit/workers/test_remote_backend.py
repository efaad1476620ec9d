"""What rollout processes have in common: shares, batches and states of several as of one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expect import raises_code
from test_rollout import config_of, worker_of

from embodrl.data.trajectory import TrajectoryBatch
from embodrl.errors import CheckpointError, WorkerDied, WorkerRaised
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.processes.liveness import stop_requested
from embodrl.scheduler.channel import LocalChannel
from embodrl.scheduler.group import Handle
from embodrl.scheduler.launchers.base import CallOutcome
from embodrl.workers.collector import EpisodeSchedule, RolloutState, Share, Snapshot, SyncCollector, share_config
from embodrl.workers.lockstep import EpisodeStats, Seconds, ShardMeta
from embodrl.workers.remote_backend import RemoteBackend, RemoteCollector
from embodrl.workers.workflows.runner import WorkflowCollector


class Processes:
    """Answers as two rollout processes would."""

    size = 2

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.random: list[Any] = []
        self.known = self

    def remember(self, random: Any) -> None:
        self.random.append(random)

    def accept_batch(self, answer: Any) -> TrajectoryBatch:
        return answer["batch"]

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        self.asked.append((method, arguments))
        return [vars(RolloutState({"random": [str(rank)]}, blobs={"env_0": bytes([rank])})) for rank in range(2)]


def test_shares_are_neighbouring_rows() -> None:
    assert [Share(rank, 3).rows(12) for rank in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    config = config_of("env.num_processes=4", "rollout.pipeline_stages=2")
    mine = share_config(config, Share(1, 2))
    assert mine.env.train.total_num_envs == config.env.train.total_num_envs // 2
    assert mine.env.eval.total_num_envs == config.env.eval.total_num_envs // 2
    assert mine.env.num_processes == 2
    assert share_config(config, Share()) is config
    config = config_of("env.num_processes=4", "env.remote=[tcp://a:1,tcp://b:1,tcp://c:1]")
    assert share_config(config, Share(1, 2)).env.remote == ("tcp://c:1", "tcp://a:1", "tcp://b:1"), "all, in turn"


def test_the_episodes_of_all_shares_are_those_of_the_run() -> None:
    config = config_of("algorithm.group_size=2", "env.train.ignore_terminations=true")
    whole = EpisodeSchedule(config, 8, 2)
    parts = [EpisodeSchedule(config, 8, 2, Share(rank, 2)) for rank in range(2)]
    for iteration, epoch in ((0, 0), (3, 1)):
        seeds, tasks = whole.draw(iteration, epoch)
        drawn = [part.draw(iteration, epoch) for part in parts]
        assert [s for one, _ in drawn for s in one] == seeds.tolist()
        assert [t for _, one in drawn for t in one] == tasks.tolist()
        assert torch.equal(torch.cat([part.group_ids(epoch) for part in parts]), whole.group_ids(epoch))


def test_processes_draw_as_the_threads_of_one_do() -> None:
    class Engine:
        make_generators = RolloutEngine.make_generators

        def __init__(self, num_threads: int, part: tuple[int, int]) -> None:
            self.num_threads, self.part = num_threads, part

    def seeds(num_threads: int, part: tuple[int, int]) -> list[int]:
        engine: Any = Engine(num_threads, part)
        return [generator.initial_seed() for generator in engine.make_generators([7])]

    assert seeds(2, (0, 2)) + seeds(2, (1, 2)) == seeds(4, (0, 1))
    assert len(set(seeds(4, (0, 1)))) == 4


def test_states_of_processes_are_kept_apart() -> None:
    processes: Any = Processes()
    processes.config = config_of()
    source = RemoteCollector(processes)
    saved = source.state()
    assert saved.state == {"processes": [{"random": ["0"]}, {"random": ["1"]}]}
    assert saved.blobs == {"rollout_0_env_0": b"\0", "rollout_1_env_0": b"\1"}
    source.load_state(saved, 5)
    method, (states, tensors, blobs) = processes.asked[-1]
    assert method == "load_state" and states == ({"random": ["0"]}, {"random": ["1"]}) and tensors == ({}, {})
    assert blobs == ({"env_0": b"\0"}, {"env_0": b"\1"})
    with raises_code("checkpoint-other-settings", CheckpointError, "1"):
        source.load_state(RolloutState({"random": ["0"]}), 5)


def test_one_process_does_not_go_on_for_several() -> None:
    worker, _ = worker_of(config_of())
    with raises_code("checkpoint-other-settings", CheckpointError, "2"):
        worker.load_state(RolloutState({"processes": [{}, {}]}), 0)


def test_rollouts_of_an_iteration_come_one_after_the_other() -> None:
    """As from one process: all environments of the first rollout, then those of the second."""
    config = config_of("algorithm.rollout_epoch=2")
    whole, _ = worker_of(config)[0].gather(0)
    size = len(whole) // 2
    rows = torch.arange(len(whole)).view(2, 2, size // 2)
    parts = [{"batch": whole[rows[:, rank].flatten()], "metas": []} for rank in range(2)]
    for part in parts:
        part["batch"].meta["env_steps"] = 3
    processes: Any = Processes()
    processes.config = config
    joined, _ = RemoteCollector(processes)._join(parts, 2)
    assert torch.equal(joined["group_id"], whole["group_id"]) and joined.meta["env_steps"] == 6
    assert torch.equal(joined.logprobs, whole.logprobs)


def handle_of(rank: int, answer: object) -> Handle:
    future: Future[CallOutcome] = Future()
    if isinstance(answer, WorkerDied):
        future.set_exception(answer)
    else:
        future.set_result(CallOutcome(answer, 0.0))
    return Handle("request", {rank: future}, lambda results: results[0], str)


class Group:
    """Two rollout processes, which answer at once; the second comes up after some attempts."""

    world_size = 2

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.asked, self.answers = list(failures), [], {}
        self.silent: Future[CallOutcome] = Future()

    def restart(self, rank: int, timeout_s: float, should_stop: Callable[[], bool]) -> None:
        self.asked.append(f"restart {rank}")
        if self.failures:
            raise self.failures.pop(0)
        if should_stop():
            raise InterruptedError

    def give_up(self, rank: int, reason: str) -> None:
        self.asked.append(f"give up {rank}")
        self.silent.set_exception(WorkerDied(f"rollout[{rank}] {reason}", rank=rank, log_tail="its stack"))

    def call_on(self, rank: int, method: str, *_: object) -> Handle:
        self.asked.append(f"{method} {rank}")
        if method == "about":
            return handle_of(rank, {"tasks": ["reach"], "num_envs": 2, "state_dim": 4})
        answer = self.answers.get(method, [None]).pop(0) if method in self.answers else None
        if answer == "silence":
            return Handle("request", {rank: self.silent}, lambda results: results[0], str)
        return handle_of(rank, answer)


class Weights:
    """A weight channel whose syncs succeed; counts the generations."""

    def __init__(self) -> None:
        self.generation = 0

    def options(self) -> dict[str, object]:
        self.generation += 1
        return {"kind": "memory", "generation": self.generation}

    def open(self, options: object, check: object = None) -> None: ...

    def send(self, weights: object, version: int, check: object = None) -> None: ...

    def close(self) -> None: ...


class Trainer:
    """The policy stays where it is."""

    present = staticmethod(nullcontext)


class Policy(torch.nn.Linear):
    def trainable_groups(self) -> dict[str, list[torch.nn.Parameter]]:
        return {"policy": list(self.parameters())}


def group_of(*failures: Exception) -> tuple[RemoteBackend, Group, Weights]:
    group, weights, channels = Group(*failures), Weights(), {f"stop_{rank}": LocalChannel("stop") for rank in range(2)}
    collaborators: list[Any] = [group, channels, weights, Policy(1, 1), Trainer()]
    rollouts = RemoteBackend(config_of("rollout.max_restarts=2"), *collaborators, lambda: False)
    assert group.asked == ["about 0", "join 0", "join 1"] and weights.generation == 1
    assert collaborators[3].seen_state_dim == 4  # for the exported policy, which acts in other processes only
    group.asked.clear()
    return rollouts, group, weights


def test_a_process_that_does_not_come_up_is_tried_again() -> None:
    rollouts, group, weights = group_of(WorkerRaised("no simulator", rank=1))
    rollouts.revive(WorkerDied("rollout[1] was killed", rank=1), incarnation=0)
    assert group.asked == ["restart 1", "restart 1", "join 0", "join 1"] and weights.generation == 2
    assert rollouts.faults.rollout_restarts == 2
    rollouts.revive(WorkerDied("rollout[1] was killed", rank=1), incarnation=1)  # of the one that did not come up
    assert rollouts.faults.rollout_restarts == 2, "it has been replaced since"


def test_attempts_to_bring_it_up_count_as_restarts() -> None:
    rollouts, group, _ = group_of(*(WorkerRaised("no simulator", rank=1) for _ in range(3)))
    with raises_code("worker-died", WorkerDied, 2, "no simulator"):
        rollouts.revive(WorkerDied("rollout[1] was killed", rank=1), incarnation=0)
    assert group.asked == ["restart 1"] * 2


def test_an_answer_counts_before_another_process_is_brought_up() -> None:
    """The one that has answered may die while that happens, and its successor starts from its answer."""
    rollouts, group, _ = group_of()
    carried = [{"random": [f"after {rank}"], "before": ["start"], "metas": []} for rank in range(2)]
    answers = [{"carried": carried[rank], "faults": {"restarts": 5 + rank}} for rank in range(2)]
    # In the order of the requests: rank 0 dies, rank 1 answers, and then the new rank 0 does.
    group.answers["gather"] = [WorkerDied("rollout[0] was killed", rank=0), answers[1], answers[0]]
    assert rollouts.call("gather", [(0,), (0,)]) == answers
    assert group.asked == ["gather 0", "gather 1", "restart 0", "join 0", "join 1", "gather 0"]
    assert (rollouts.faults.restarts, rollouts.faults.rollout_restarts) == (11, 1)
    group.asked.clear()
    rollouts.revive(WorkerDied("rollout[1] was killed", rank=1), incarnation=0)
    assert group.asked == ["restart 1", "join 0", "join 1", "restore 1"]


def test_a_restart_keeps_nothing_of_the_iteration_alive() -> None:
    """The error of the process that died knows the frames that it passed, and those what they had: batches."""
    rollouts, group, _ = group_of()
    group.answers["gather"] = [{"faults": {}}, WorkerDied("rollout[1] was killed", rank=1), {"faults": {}}]

    def iteration() -> weakref.ref[Policy]:
        batch = Policy(1, 1)
        rollouts.call("gather", [(0,), (0,)])
        return weakref.ref(batch)

    gc.disable()  # which would find it, but late: in a large heap it hardly ever looks at what is old
    try:
        assert iteration()() is None
    finally:
        gc.enable()


@pytest.fixture
def soon() -> Iterator[None]:
    """The run is to end soon: a signal has come."""
    stop_requested.set()
    yield
    stop_requested.clear()


def test_who_dies_when_a_signal_has_come_is_not_restarted_and_the_others_answers_count(soon: None) -> None:
    rollouts, group, weights = group_of()
    rollouts.known.remember([["start 0"], ["start 1"]])
    undone = [["start 0"], WorkerDied("rollout[1] was killed", rank=1)]
    group.answers |= {
        "gather": [None, WorkerDied("rollout[1] was killed", rank=1)],
        "undo": undone,
        "state": [vars(RolloutState({"random": ["start 0"]}, blobs={"env_0": b"0"})), undone[1]],
    }
    with pytest.raises(InterruptedError):
        rollouts.call("gather", [(0,), (0,)])
    collector = RemoteCollector(rollouts)
    collector.undo()
    saved = collector.state()
    assert saved.state == {"processes": [{"random": ["start 0"]}, {"lost": True, "random": ["start 1"]}]}
    assert saved.blobs == {"rollout_0_env_0": b"0"}
    rollouts.update_weights([], 1)
    assert not any(asked.startswith("restart") for asked in group.asked) and weights.generation == 1


def test_who_is_lost_in_an_update_is_where_the_update_began() -> None:
    rollouts, _, _ = group_of()
    assert rollouts.known.state_of_lost(0).state == {"lost": True}, "nothing is known of it"
    rollouts.known.snapshots = [{"metas": [], "random": ["now"], "before": ["start"]} for _ in range(2)]
    rollouts.known.remember([None, ["told"]])
    assert [rollouts.known.state_of_lost(rank).state["random"] for rank in range(2)] == [["start"], ["told"]]


def test_a_restart_under_way_is_given_up_when_a_signal_comes() -> None:
    rollouts, group, _ = group_of()
    restart = group.restart

    def restart_with_signal(*arguments: Any) -> None:
        stop_requested.set()
        restart(*arguments)

    group.restart = restart_with_signal  # type: ignore[method-assign]
    try:
        with pytest.raises(InterruptedError):
            rollouts.revive(WorkerDied("rollout[1] was killed", rank=1), incarnation=0)
    finally:
        stop_requested.clear()
    assert group.asked == ["restart 1"]


def test_who_lives_and_does_not_answer_after_a_signal_is_ended_with_its_stack_in_the_log(
    soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    rollouts, group, _ = group_of()
    rollouts._patience._timeout_s = 0.0
    group.answers["gather"] = [None, "silence"]
    with pytest.raises(InterruptedError):
        rollouts.call("gather", [(0,), (0,)])
    assert group.asked == ["gather 0", "gather 1", "give up 1"]
    assert "rollout[1] has not answered for 0 s after a signal" in caplog.text and "its stack" in caplog.text


def test_the_successor_of_a_lost_process_has_fresh_simulators() -> None:
    asked: list[Any] = []
    engine: Any = SimpleNamespace(set_random_state=asked.append, version=0)
    pool: Any = SimpleNamespace(spec=SimpleNamespace(num_envs=4, tasks=("reach",)))  # takes no states
    worker = SyncCollector(config_of(), pool, engine, lambda: False)
    worker.load_state(RolloutState({"lost": True, "random": ["a"]}), 3)
    worker.load_state(RolloutState({"lost": True}), 4)
    assert asked == [["a"]] and engine.version == 4


@pytest.mark.parametrize("kind", [SyncCollector, WorkflowCollector])
def test_what_was_counted_is_reported_after_carrying_on(kind: type[SyncCollector]) -> None:
    asked: list[Any] = []
    settings = (
        []
        if kind is SyncCollector
        else [
            "rollout.workflow=embodrl.workers.workflows.workflow:ChunkWorkflow",
            "env.train.auto_reset=false",
            "env.train.max_steps_per_rollout_epoch=8",
        ]
    )
    engine: Any = SimpleNamespace(set_random_state=asked.append)
    spec = SimpleNamespace(num_envs=4, tasks=("reach",))
    pool: Any = SimpleNamespace(call=lambda *names, **_: asked.append(names[0]), spec=spec)
    worker = kind(config_of(*settings), pool, engine, lambda: False)
    meta: ShardMeta = {"episodes": vars(EpisodeStats(episodes=8, returns=2.5)), "seconds": vars(Seconds(env=3.0))}
    carried: Snapshot = {"metas": [meta], "random": ["after"], "before": ["start"]}
    worker.restore(carried)
    assert asked == [["after"], "mark"]
    assert worker.metas() == [meta]
    worker.undo()
    assert asked[2:] == [["start"], "rewind"]
