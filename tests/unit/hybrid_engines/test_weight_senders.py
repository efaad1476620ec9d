"""Weights from training processes to those that act, past the main process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expect import raises_code
from sending_worker import CountingWorker
from sync_parts import Target
from tiny_training import deployment_of, train, training_config
from torch import Tensor

from embodrl.config.schema import Config
from embodrl.errors import IncompleteSyncError, WeightSyncError, WorkerDied, WorkerError, WorkerRaised
from embodrl.hybrid_engines.training.remote import RemoteTrainEngine
from embodrl.hybrid_engines.weight_sync.buckets import layout_of, num_bytes, trained_names
from embodrl.hybrid_engines.weight_sync.collective import SyncGroup
from embodrl.hybrid_engines.weight_sync.memory import MemoryReceiver
from embodrl.models.base import VLAPolicy
from embodrl.scheduler.channel import LocalChannel, SharedChannel
from embodrl.scheduler.group import Handle, WorkerGroup, first_cause
from embodrl.scheduler.launchers.base import CallOutcome, free_port
from embodrl.scheduler.launchers.inline import InlineLauncher
from embodrl.scheduler.launchers.process import ProcessLauncher
from embodrl.workers.actor import launch_trainers
from embodrl.workers.policy import build_policy, configure_torch
from embodrl.workers.remote_backend import sends_weights
from embodrl.workers.weights import ReceiverThread, RemoteSender, Route, WeightChannel

PIPE = "weights_0"
ALGORITHM = {"update_epoch": 1}


def state_of(policy: VLAPolicy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


class Bench:
    """Training in the process of the test, as if it were another one, and a policy that receives."""

    def __init__(self, config: Config, directory: Path, patches: bool = False) -> None:
        configure_torch(config)
        self.config, self.launcher = config, InlineLauncher()
        self.channels = SharedChannel(PIPE, 8), SharedChannel("answers", 8)
        pipe, answers = self.channels
        self.policy, acting = build_policy(config), build_policy(config)
        group = launch_trainers(config, deployment_of(config), None, self.launcher, {PIPE: pipe})
        self.engine = RemoteTrainEngine(self.policy, group)
        self.target = Target(acting)  # type: ignore[arg-type]
        end = RemoteSender(group, {PIPE: pipe}, trained_names(self.policy), patches)
        self.link = WeightChannel("memory", end, [answers], directory)
        self.join()

    def join(self) -> None:
        """Begin a generation of the link."""
        pipe, answers = self.channels
        options = self.link.options()
        self.link.open(options)
        self.receiver = MemoryReceiver(self.target, pipe, layout_of(self.target.net))
        self.inbox = ReceiverThread(self.receiver, answers, options["generation"])

    def close(self) -> None:
        self.inbox.close()
        self.engine.close()
        self.launcher.close()
        for channel in self.channels:
            channel.release()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(training_config(algorithm=ALGORITHM), tmp_path)
    yield found
    found.close()


def test_the_policy_of_the_main_process_is_written_only_when_it_is_asked_for(bench: Bench) -> None:
    engine, before = bench.engine, state_of(bench.policy)
    bench.link.send((), 0)
    assert same(state_of(bench.target.net), before)  # type: ignore[arg-type]
    train(engine, "openvla", bench.policy, bench.config, range(2))
    bench.link.send((), 2)
    assert same(state_of(bench.policy), before), "weights went past it"
    acting = state_of(bench.target.net)  # type: ignore[arg-type]
    assert not same(acting, before) and bench.target.version == 2
    assert same(dict(engine.weights()), acting) and same(state_of(bench.policy), acting)


def test_patches_that_do_not_fit_are_an_error_and_a_new_generation_gets_everything(tmp_path: Path) -> None:
    optim = {"lr": 1e-5, "lr_warmup_iterations": 0}
    actor = {"global_batch_size": 8, "micro_batch_size": 2, "param_dtype": "bf16", "optim": optim}
    bench = Bench(training_config(algorithm=ALGORITHM, actor=actor), tmp_path, patches=True)
    try:
        for version in (0, 2, 4):
            bench.link.send((), version)
            assert bench.link.metrics()["weight_sync/whole"] == 1
            assert (bench.link.metrics()["weight_sync/changed"] == 1.0) == (version == 0)
            assert same(dict(bench.engine.weights()), state_of(bench.target.net))  # type: ignore[arg-type]
            train(bench.engine, "openvla", bench.policy, bench.config, range(version, version + 2))
        copies = bench.receiver._copies._tensors  # pyright: ignore[reportPrivateUsage]
        damaged = next(tensor for name, tensor in copies.items() if name.endswith("weight"))
        damaged.view(torch.uint8).bitwise_xor_(1)
        with raises_code("weight-sync", WeightSyncError, "6"):
            bench.link.send((), 6)
        assert bench.target.version == 4
        bench.inbox.close()
        bench.join()
        bench.link.send((), 6)
        assert bench.target.version == 6 and bench.link.metrics()["weight_sync/whole"] == 2
        assert same(dict(bench.engine.weights()), state_of(bench.target.net))  # type: ignore[arg-type]
    finally:
        bench.close()


def test_a_checkpoint_in_one_piece_and_the_end_of_a_run_fetch_it(bench: Bench) -> None:
    engine = bench.engine
    train(engine, "openvla", bench.policy, bench.config, range(2))
    saved = {name: tensor.clone() for name, tensor in engine.state_dict().tensors["policy"].items()}
    bench.link.send((), 2)
    assert same(saved, state_of(bench.target.net))  # type: ignore[arg-type]
    train(engine, "openvla", bench.policy, bench.config, range(2, 3))
    assert same(state_of(bench.policy), saved)
    engine.fetch()
    bench.link.send((), 3)
    assert same(state_of(bench.policy), state_of(bench.target.net)) and not same(saved, state_of(bench.policy))  # type: ignore[arg-type]


def test_a_state_that_was_loaded_is_not_overwritten(bench: Bench) -> None:
    engine = bench.engine
    saved = engine.state_dict()
    before = {name: tensor.clone() for name, tensor in saved.tensors["policy"].items()}
    saved.tensors["policy"] = before
    train(engine, "openvla", bench.policy, bench.config, range(2))
    engine.load_state_dict(saved)
    assert same(state_of(bench.policy), before)
    bench.link.send((), 5)
    assert same(state_of(bench.target.net), before)  # type: ignore[arg-type]


def test_an_old_version_is_an_error_of_the_sync_and_not_of_the_process(bench: Bench) -> None:
    bench.link.send((), 3)
    with raises_code("weight-sync", WeightSyncError, "3"):
        bench.link.send((), 3)
    bench.link.send((), 4)
    assert bench.target.version == 4


def test_weights_left_in_a_directory_are_an_error_of_the_sync(bench: Bench, tmp_path: Path) -> None:
    old = tmp_path / "v000007"
    old.mkdir()
    (old / "STABLE").write_text("")
    with raises_code("weight-sync", WeightSyncError):
        bench.link.sender.open(Route(kind="disk", generation=1, where=str(tmp_path), world_size=2, device="cpu"))


PIPES = {f"weights_{rank}": LocalChannel(f"weights_{rank}", 2) for rank in range(2)}


class Group:
    """A group of one process; what it answers is there when it has been waited for."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.future, self.killed = answer, Future(), False

    def check(self) -> None: ...

    def call(self, method: str, *_: Any) -> Handle:
        future = self.future
        if method == "make_sender":
            future = Future()
            future.set_result(CallOutcome(None, 0.0))
        return Handle(method, {0: future}, list, lambda rank: "")

    def finish(self) -> None:
        if isinstance(self.answer, Exception):
            self.future.set_exception(self.answer)
        else:
            self.future.set_result(CallOutcome(self.answer, 0.0))

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize("error", [WorkerDied("actor[0] was killed", rank=0), WorkerRaised("out of memory", rank=0)])
def test_a_training_process_that_fails_is_not_taken_for_one_that_plays(error: WorkerError) -> None:
    """Those would be started again."""
    group: Any = Group(error)
    with raises_code("worker", WorkerError) as caught:
        RemoteSender(group, PIPES, ["a"]).send((), 1, group.finish)
    assert type(caught.value) is WorkerError and group.killed


def test_one_that_plays_and_dies_is_reported_when_the_sender_is_free_again() -> None:
    group: Any = Group(None)
    asked: list[int] = []

    def check() -> None:
        asked.append(len(asked))
        group.finish()
        raise WorkerDied("rollout[1] was killed", rank=1)

    with raises_code("worker-died", WorkerDied, "rollout[1]"):
        RemoteSender(group, PIPES, ["a"]).send((), 1, check)
    assert asked == [0] and group.future.done() and not group.killed


def test_the_pipe_of_one_that_has_gone_is_emptied_for_the_sender() -> None:
    """Which would else wait for room in it; those of the others are theirs."""
    pipes = {name: LocalChannel(name, 2) for name in ("weights_0", "weights_1")}
    for pipe in pipes.values():
        pipe.put({"sync": "begin"})
    group: Any = Group(None)

    def check() -> None:
        group.finish()
        raise WorkerDied("rollout[1] was killed", rank=1)

    with raises_code("worker-died", WorkerDied, "rollout[1]"):
        RemoteSender(group, pipes, ["a"]).send((), 1, check)
    assert [len(pipe._values) for pipe in pipes.values()] == [1, 0]


def test_a_rendezvous_is_cancelled_when_a_rollout_process_dies() -> None:
    """The sender, in its own process, would wait for it to connect; the driver knows of the death."""
    group: Any = Group(None)
    where = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    asked: list[int] = []

    def check() -> None:
        asked.append(0)
        raise WorkerDied("rollout[1] was killed", rank=1)

    def connect() -> None:
        with raises_code("incomplete-sync", IncompleteSyncError):
            SyncGroup(where, 0, len(PIPES) + 1, connect_s=600.0)
        group.finish()

    route = Route(kind="collective", generation=1, where=where, world_size=len(PIPES) + 1, device="cpu")
    sender = threading.Thread(target=connect)
    sender.start()
    with raises_code("worker-died", WorkerDied, "rollout[1]"):
        RemoteSender(group, PIPES, ["a"]).open(route, check)
    sender.join(60.0)
    assert asked == [0] and group.future.done() and not group.killed


def test_who_sends() -> None:
    apart = {"actor": {"own_process": True}, "rollout": {"own_process": True}}
    ahead = {"runner": {"max_staleness": 1}, "algorithm": {"decoupled": {"enabled": True}}}

    def sends(**changes: Any) -> bool:
        config = training_config(**changes)
        return sends_weights(config, deployment_of(config))

    assert sends(**apart)
    assert not sends(actor={"own_process": True})
    assert not sends(rollout={"own_process": True})
    assert not sends(**apart, **ahead)


@pytest.mark.slow
def test_shards_are_gathered_a_bucket_at_a_time_and_only_those_that_travel(tmp_path: Path) -> None:
    config = training_config(actor={"training_backend": "fsdp"}, model={"trainable": "head"})
    configure_torch(config)
    policy = build_policy(config)
    launcher = ProcessLauncher()
    group = WorkerGroup(CountingWorker, "actor", config=config, deployment=deployment_of(config, 2))
    try:
        channels = {PIPE: launcher.channel(PIPE, 4), "answers": launcher.channel("answers", 4)}
        group.launch(2, launcher, channels, timeout_s=600.0)
        names = trained_names(policy)
        link = WeightChannel(
            "memory",
            RemoteSender(group, {PIPE: channels[PIPE]}, names),
            [channels["answers"]],
            tmp_path,
        )
        options = link.options()
        link.open(options)
        sizes = {name: num_bytes(tensor) for name, tensor in policy.state_dict().items()}
        bucket, largest = 2 * max(sizes.values()), max(sizes.values())
        acting = build_policy(config)
        with torch.no_grad():
            for parameter in acting.parameters():
                parameter.zero_()
        inbox = ReceiverThread(
            MemoryReceiver(Target(acting), channels[PIPE], layout_of(acting)),  # type: ignore[arg-type]
            channels["answers"],
            options["generation"],
        )
        try:
            group.count(bucket).result(600.0)
            link.send((), 0)
            assert same(state_of(acting), state_of(policy))
            (gathered, peak), (theirs, _) = group.counted().result(600.0)
            # A bucket, and the tensor that did not fit into it, were alive at a time.
            assert gathered == theirs == len(sizes) and largest < peak <= bucket + largest < sum(sizes.values())
            group.count(bucket).result(600.0)
            link.send((), 1)
            assert [number for number, _ in group.counted().result(600.0)] == [len(names)] * 2 < [len(sizes)] * 2
        finally:
            inbox.close()
    finally:
        group.kill()
        launcher.close()


def test_the_death_of_a_process_is_the_cause_of_what_another_raises():
    """A lost connection is reported at once by the process at its other end, before the death itself is noticed."""
    lost, died = WorkerRaised("actor[0] raised RuntimeError", "", 0), WorkerDied("actor[1] was killed", "", 1)
    futures = {0: Future(), 1: Future()}
    futures[0].set_exception(lost)
    thread = threading.Timer(0.2, futures[1].set_exception, (died,))
    thread.start()
    handle = SimpleNamespace(futures=futures)
    assert first_cause(lost, [handle]) is died  # type: ignore[list-item]
    futures[1] = Future()
    futures[1].set_result(None)
    assert first_cause(lost, [handle]) is lost  # type: ignore[list-item]
