"""Every kind of weight sync between real processes: one to two, and sharded to whole."""

import pytest
from expect import raises_code
from sync_parts import ADAPTERS, Actor, Net, Trainer

from embodrl.errors import WorkerRaised
from embodrl.hybrid_engines.weight_sync.buckets import num_bytes
from embodrl.scheduler.group import WorkerGroup, wait_all
from embodrl.scheduler.launchers.process import ProcessLauncher

pytestmark = pytest.mark.slow
START_S, CALL_S = 240.0, 200.0
KINDS = ("memory", "collective", "disk")
NUM_TENSORS = len(Net().state_dict())


class Pair:
    """A trainer and an actor group; ``connect`` gives them new senders and receivers."""

    def __init__(self, trainers, actors):
        self.actors = actors
        self.launcher = ProcessLauncher()
        channels = {f"weights_{rank}": self.launcher.channel(f"weights_{rank}", 2) for rank in range(actors)}
        self.trainer = WorkerGroup(Trainer, "trainer", receivers=actors)
        self.trainer.launch(trainers, self.launcher, channels, timeout_s=START_S)
        self.actor = WorkerGroup(Actor, "actor", receivers=actors)
        self.actor.launch(actors, self.launcher, channels, timeout_s=START_S)

    def connect(self, tmp_path, kind, trained=None, bucket_bytes=2048, other_model=-1, patches=False):
        self.kind = kind
        meeting = str(tmp_path / "weights") if kind == "disk" else f"file://{tmp_path}/meeting"
        wait_all(
            [
                self.trainer.connect(kind, meeting, trained, bucket_bytes, True, patches),
                self.actor.connect(kind, meeting, other_model),
            ],
            CALL_S,
        )

    def sync(self, version, **how):
        """Send and receive; return what the first trainer and all actors say."""
        sent = self.trainer.send(version, **how)
        if self.kind == "disk":
            sent.result(CALL_S)  # else a quick reader takes what is there already
        received = self.actor.receive()
        return sent.result(CALL_S)[0], received.result(CALL_S)

    def states(self):
        return self.actor.state().result(CALL_S)

    def close(self):
        self.trainer.kill()
        self.actor.kill()
        self.launcher.close()


@pytest.fixture(scope="module")
def one_to_two():
    pair = Pair(1, 2)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def shards_to_one():
    pair = Pair(2, 1)
    yield pair
    pair.close()


@pytest.fixture(params=["one_to_two", "shards_to_one"])
def pair(request):
    return request.getfixturevalue(request.param)


def total(names=None):
    return sum(num_bytes(t) for name, t in Net().state_dict().items() if names is None or name in names)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_arrive_whole_whatever_their_layout(tmp_path, pair, kind):
    pair.connect(tmp_path, kind)
    for version in (0, 3):
        sent, received = pair.sync(version)
        assert sent["num_bytes"] == total() and sent["full"]
        assert [(r["version"], r["num_bytes"], r["num_tensors"]) for r in received] == [
            (version, total(), NUM_TENSORS)
        ] * pair.actors
        assert pair.states() == [(version, Net().become(version).sums())] * pair.actors
    assert pair.actor.receive(0.0).result(CALL_S) == [None] * pair.actors
    largest = max(num_bytes(tensor) for tensor in Net().state_dict().values())
    # A bucket, and the tensor that did not fit into it, were alive at a time.
    assert largest <= pair.trainer.peak().result(CALL_S) <= 2048 + largest < total()


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_trains_travels_after_the_first_sync(tmp_path, pair, kind):
    pair.connect(tmp_path, kind, trained=ADAPTERS)
    assert pair.sync(0)[0]["full"]
    sent, received = pair.sync(1)
    assert sent["num_bytes"] == total(ADAPTERS)
    assert [(r["num_bytes"], r["num_tensors"], r["full"]) for r in received] == [
        (total(ADAPTERS), len(ADAPTERS), False)
    ] * pair.actors
    assert pair.states() == [(1, Net().become(0).become(1, ADAPTERS).sums())] * pair.actors
    assert pair.sync(2, full=True)[0]["full"]
    assert pair.states() == [(2, Net().become(2).sums())] * pair.actors


@pytest.mark.parametrize("kind", ["memory", "collective"])
def test_patches_of_weights_arrive_whole(tmp_path, pair, kind):
    """The third version has the values of the second one, and the last one other values."""
    pair.connect(tmp_path, kind, patches=True)
    sizes = []
    for version, values_of in ((0, 0), (1, 1), (2, 1), (3, 3)):
        _, received = pair.sync(version, values_of=values_of)
        assert [(r["num_bytes"], r["num_tensors"]) for r in received] == [(total(), NUM_TENSORS)] * pair.actors
        assert pair.states() == [(version, Net().become(values_of).sums())] * pair.actors
        sizes.append({r["received"]["num_bytes"] for r in received})
    assert sizes[0] == {total()} and sizes[2] == {0} and max(sizes[1] | sizes[3]) <= total()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_that_fails_midway_leaves_the_old_version(tmp_path, pair, kind):
    pair.connect(tmp_path, kind)
    pair.sync(0)
    sent, received = pair.trainer.send(1, fail_at=6), pair.actor.receive(0.0 if kind == "disk" else 60.0)
    with raises_code("embodrl", WorkerRaised, "lost its mind"):
        sent.result(CALL_S)
    for answer in received.result(CALL_S):
        if kind == "disk":
            assert answer is None  # it was never marked STABLE
        else:
            assert answer["error"] == "IncompleteSyncError" and "lost its mind" in answer["message"]
    assert pair.states() == [(0, Net().become(0).sums())] * pair.actors
    pair.sync(2)
    assert pair.states() == [(2, Net().become(2).sums())] * pair.actors


@pytest.mark.parametrize("kind", ["memory", "collective"])
def test_weights_of_another_model_are_refused(tmp_path, one_to_two, kind):
    pair = one_to_two
    pair.connect(tmp_path, kind, other_model=0)
    sent, received = pair.trainer.send(0), pair.actor.receive()
    first, second = received.result(CALL_S)
    assert first["error"] == "WeightLayoutError" and "(2, 16) instead of (2, 8)" in first["message"]
    untouched = (-1, Net().become(-1).sums())
    if kind == "collective":  # they vote
        assert second["error"] == "IncompleteSyncError" and "another receiver refused" in second["message"]
        with raises_code("incomplete-sync", WorkerRaised):
            sent.result(CALL_S)
        assert pair.states() == [untouched] * 2
    else:
        assert pair.states() == [untouched, (0, Net().become(0).sums())]
