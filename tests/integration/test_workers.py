"""What every launcher must do; the same worker code under all three."""

import importlib.util
import os

import numpy as np
import pytest
import torch
from batches import same
from expect import raises_code
from worker_classes import Adder, Reducer, Talker

from embodrl.config import load_config
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.deployment import ProcessPlace
from embodrl.errors import ChannelTimeout, EmbodrlError, MessageError, WorkerRaised
from embodrl.scheduler.group import WorkerGroup, wait_all
from embodrl.scheduler.launchers.inline import InlineLauncher
from embodrl.scheduler.launchers.process import ProcessLauncher

START_S, CALL_S = 240.0, 120.0
PLACES = [ProcessPlace("adder", 0, devices=(0,)), ProcessPlace("adder", 1, devices=(1, 2))]
RAY_PLACES = [*PLACES, *(ProcessPlace("other", rank) for rank in range(6))]


@pytest.fixture(scope="module", params=["inline", "process", pytest.param("ray", marks=pytest.mark.slow)])
def launcher(request):
    if request.param == "inline":
        found = InlineLauncher()
    elif request.param == "process":
        found = ProcessLauncher()
    else:
        if importlib.util.find_spec("ray") is None:
            pytest.skip("Ray is not installed (extra: ray)")
        from embodrl.scheduler.launchers.ray.launcher import RayLauncher

        found = RayLauncher(RAY_PLACES, timeout_s=120, num_cpus=8, num_gpus=3)
    yield found
    found.close()


@pytest.fixture(scope="module")
def adders(launcher):
    with WorkerGroup(Adder, "adder", offset=10).launch(PLACES, launcher, timeout_s=START_S) as group:
        yield group


def is_inline(launcher):
    return isinstance(launcher, InlineLauncher)


def test_each_worker_knows_its_place(adders):
    found = adders.where().result(CALL_S)
    assert [(w["rank"], w["size"], w["devices"]) for w in found] == [(0, 2, (0,)), (1, 2, (1, 2))]


def test_split_shares_rows_and_puts_results_together(adders):
    numbers = torch.arange(6.0).reshape(6, 1)
    assert torch.equal(adders.add(numbers, extra=100).result(CALL_S), numbers + 110)


def test_split_refuses_what_can_not_be_shared(adders):
    with raises_code("dispatch-rows", EmbodrlError, "5 rows", "2 workers"):
        adders.add(torch.zeros(5))


def test_batches_go_there_and_back(adders):
    batch = TrajectoryBatch(
        {"rewards": torch.rand(3, 4, 2), "forward_inputs": {"ids": torch.arange(24).reshape(3, 4, 2)}},
        {"instruction": ["a", "b", "c", "d"]},
        {"env_steps": 7},
        [3, 4],
    )
    result = adders.label(batch).result(CALL_S)
    assert isinstance(result, TrajectoryBatch)
    assert result["rank"].tolist() == [[0, 0, 1, 1]] * 3
    assert "rank" not in batch
    result.pop("rank")
    assert same(result, batch)


def test_values_of_all_kinds_come_back_the_same(adders):
    value = {
        "none": None,
        "numbers": [1, -2.5, True, float("inf")],
        "pair": (1, ("a", b"\x00\xff")),
        3: np.arange(6, dtype=np.int16).reshape(2, 3),
        "text": np.array(["ab", "c"]),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "flag": torch.tensor(True),
        "empty": torch.zeros(0, 4),
    }
    result = adders.first(value).result(CALL_S)
    assert result["none"] is None and result["numbers"] == value["numbers"] and result["pair"] == value["pair"]
    assert result[3].dtype == np.int16 and (result[3] == value[3]).all() and result["text"].tolist() == ["ab", "c"]
    for name in ("half", "flag", "empty"):
        assert result[name].dtype == value[name].dtype and torch.equal(result[name], value[name])


def test_a_configuration_goes_there_and_back(adders):
    config = load_config(["runner.seed=5"]).config
    assert adders.first(config).result(CALL_S) == config


def test_custom_dispatch_and_collect(adders):
    assert adders.last(5).result(CALL_S) == 6


def test_calls_of_a_worker_keep_their_order(adders):
    handles = [adders.note(str(index)) for index in range(20)]
    wait_all(handles, CALL_S)
    assert [handle.result()[1][-1] for handle in handles] == [str(index) for index in range(20)]


def test_a_worker_owns_what_it_gets(adders):
    for values in (np.zeros(1000), torch.zeros(1000)):
        assert adders.spoil(values).result(CALL_S) == [1000.0, 1000.0]
        assert values.sum() == 0


def test_an_exception_comes_with_rank_and_traceback(adders):
    handle = adders.fail(1)
    with raises_code("worker-raised", WorkerRaised, "adder[1]", "KeyError") as caught:
        handle.result(CALL_S)
    assert caught.value.rank == 1
    assert "raise KeyError" in caught.value.traceback
    assert isinstance(handle.error, WorkerRaised)
    assert adders.first(1).result(CALL_S) == 1  # it continues


@pytest.mark.parametrize("name", ["SystemExit", "CancelledError", "GeneratorExit"])
def test_what_is_raised_and_no_exception_is_one_of_the_worker(launcher, adders, name):
    if is_inline(launcher):
        pytest.skip("it is raised where the call is made")
    with raises_code("worker-raised", WorkerRaised, "adder", name) as caught:  # of either: both raise it
        adders.raise_no_exception(name).result(CALL_S)
    assert "in raise_no_exception" in caught.value.traceback
    assert adders.first(1).result(CALL_S) == 1  # it continues


def test_what_can_not_be_sent_is_refused_and_named(adders):
    with raises_code("message", MessageError, "[0][0]['here']"):
        adders.first([{"here": object()}])
    with raises_code("message"):
        adders.unsendable().result(CALL_S)


def test_methods_that_are_not_there_or_not_marked(adders):
    with pytest.raises(AttributeError, match="did you mean 'first'"):
        adders.frist(1)
    with raises_code("worker-method"):
        adders.call("hidden")


def test_handles_have_durations(adders):
    handle = adders.where()
    handle.result(CALL_S)
    assert handle.done and set(handle.durations) == {0, 1} and handle.duration_s >= 0
    assert set(handle.metrics()) == {"time/where_s"} and set(handle.metrics("env")) == {"time/env_s"}


def test_a_constructor_that_raises_leaves_nothing(launcher):
    group = WorkerGroup(Adder, "adder", fail_on=1)
    with raises_code("rank-refused", WorkerRaised, "rank 1 will not") as caught:
        group.launch(PLACES, launcher, timeout_s=START_S)
    assert caught.value.rank == 1 and caught.value.hint == "ask another" and caught.value.code == "rank-refused"
    assert group.world_size == 0


def test_workers_pass_values_through_a_bounded_channel(launcher):
    places = [ProcessPlace("talker", 0)]
    channel = launcher.channel("numbers", 3)
    with (
        WorkerGroup(Talker, "source").launch(places, launcher, {"numbers": channel}, timeout_s=START_S) as source,
        WorkerGroup(Talker, "sink").launch(places, launcher, {"numbers": channel}, timeout_s=START_S) as sink,
    ):
        if is_inline(launcher):  # there is no reader while it writes
            with raises_code("channel-timeout", WorkerRaised, "3"):
                source.produce(4).result()
            assert sink.consume(3).result() == [[0, 1, 2]]
        else:
            handles = [source.produce(30), sink.consume(30)]
            wait_all(handles, CALL_S)
            assert handles[1].result() == [list(range(30))]
        with raises_code("channel", WorkerRaised, "'numbers'"):
            sink.misname().result(CALL_S)
        with raises_code("channel-timeout", ChannelTimeout):
            channel.get(timeout_s=0.01)
        for value in range(3):
            channel.put(value, timeout_s=CALL_S)
        with raises_code("channel-timeout", ChannelTimeout):
            channel.put(3, timeout_s=0.01)


def test_processes_are_apart_and_bound(launcher):
    if is_inline(launcher):
        pytest.skip("inline workers share a process")
    cpu = min(os.sched_getaffinity(0))
    places = [ProcessPlace("adder", rank, cpus=(cpu,)) for rank in range(2)]
    with WorkerGroup(Adder, "bound").launch(places, launcher, timeout_s=START_S) as group:
        found = group.cpus().result(CALL_S)
    assert [cpus for cpus, _ in found] == [[cpu], [cpu]]
    assert len({os.getpid(), *(pid for _, pid in found)}) == 3


def test_ranks_meet_in_torch_distributed(launcher):
    if is_inline(launcher):
        pytest.skip("inline workers run one after the other")
    with WorkerGroup(Reducer, "reducer").launch(PLACES, launcher, timeout_s=START_S) as group:
        assert group.total(2.0).result(CALL_S) == [6.0, 6.0]


def test_a_worker_can_be_restarted(launcher):
    with WorkerGroup(Adder, "again", offset=1).launch(PLACES, launcher, timeout_s=START_S) as group:
        group.note("before").result(CALL_S)
        group.restart(1, timeout_s=START_S)
        assert group.note("after").result(CALL_S) == [["before", "after"], ["after"]]
