"""Weight sync within one process: buckets, versions, what is refused, and what stays when a sync is torn."""

import pytest
import torch
from expect import raises_code
from sync_parts import ADAPTERS, Net, PeakCounter, Target, by_disk, by_memory, same, weights

from embodrl.errors import (
    ChannelTimeout,
    EmbodrlError,
    IncompleteSyncError,
    WeightChecksumError,
    WeightLayoutError,
    WeightVersionError,
    WorkerDied,
)
from embodrl.hybrid_engines.weight_sync.buckets import buckets, checksum, layout_of, num_bytes, trained_names
from embodrl.hybrid_engines.weight_sync.collective import CollectiveReceiver, CollectiveSender, SyncGroup
from embodrl.hybrid_engines.weight_sync.disk import DiskSender
from embodrl.hybrid_engines.weight_sync.memory import MemoryReceiver, MemorySender
from embodrl.scheduler.channel import LocalChannel


@pytest.fixture(params=["memory", "disk"])
def sides(request, tmp_path):
    make = {"memory": by_memory, "disk": lambda: by_disk(tmp_path)}
    return make[request.param]()


# -- buckets ----------------------------------------------------------------------------------------------------------


def test_a_bucket_is_as_full_as_it_may_be():
    sizes = [10, 20, 30, 100, 5, 95, 1]  # bytes
    stream = [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in sizes]
    found = [[name for name, _ in bucket] for bucket in buckets(stream, 60)]
    assert found == [["10", "20", "30"], ["100"], ["5"], ["95"], ["1"]]


def test_a_checksum_is_the_crc_of_the_bytes():
    # CRC-32 of b"123456789" is 0xCBF43926 (the check value of its definition).
    digits = torch.tensor(list(b"123456789"), dtype=torch.uint8)
    assert checksum(digits) == 0xCBF43926
    assert checksum(digits.view(3, 3).t().contiguous().t()) == 0xCBF43926  # of the elements in order
    assert checksum(torch.zeros(0)) == 0


@pytest.mark.parametrize("kind", ["memory", "disk", "collective"])
def test_one_bucket_is_alive_at_a_time(tmp_path, kind):
    counter, size, bucket_bytes = PeakCounter(), 4000, 10_000

    def stream():
        for index in range(40):
            yield str(index), counter.watch(torch.full((1000,), float(index)))

    if kind == "memory":
        sender = MemorySender([LocalChannel("weights", 64)], None, bucket_bytes)
    elif kind == "disk":
        sender = DiskSender(tmp_path, None, bucket_bytes)
    else:
        sender = CollectiveSender(NoGroup(), None, bucket_bytes)
    assert sender.send(stream(), 1).num_bytes == 40 * size
    assert counter.peak <= 3 * size  # a bucket of two, and the tensor that did not fit


class NoGroup:
    """A group without members."""

    device, broken = torch.device("cpu"), False

    def announce(self, number):
        pass

    def describe(self, content=b""):
        return content

    def broadcast(self, buffer):
        assert buffer.numel() <= 10_000 + 1000  # the header

    def all_agree(self, agree):
        return agree


def test_what_trains_is_known_by_name():
    from toy_policy import ToyPolicy

    policy = ToyPolicy()
    policy.body.requires_grad_(False)
    policy.norm.register_buffer("seen", torch.zeros(1))
    names = {"norm.weight", "norm.bias", "norm.seen", "head.weight", "head.bias", "value.weight", "value.bias"}
    assert trained_names(policy) == names


# -- all kinds --------------------------------------------------------------------------------------------------------


def test_weights_are_taken_over_once(sides):
    sender, receiver, target = sides
    assert receiver.receive() is None
    sent = sender.send(weights(4), 4)
    report = receiver.receive()
    assert same(target, 4) and (report.version, report.full) == (4, True)
    assert report.num_bytes == sent.num_bytes == sum(num_bytes(tensor) for _, tensor in weights(0))
    assert receiver.receive() is None


def test_versions_only_grow(sides):
    sender, receiver, target = sides
    sender.send(weights(4), 4)
    receiver.receive()
    for version in (4, 3):
        with raises_code("weight-version", WeightVersionError, version, 4):
            sender.send(weights(version), version)
    assert same(target, 4)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_only_what_trains_travels_after_the_first_sync(tmp_path, kind):
    make = {"memory": by_memory, "disk": lambda names: by_disk(tmp_path, names)}
    sender, receiver, target = make[kind](ADAPTERS)
    sender.send(weights(0), 0)
    assert receiver.receive().full
    assert sender.send(weights(1), 1).num_tensors == receiver_tensors(receiver) == 2
    assert target.net.sums() == Net().become(0).become(1, ADAPTERS).sums()


def receiver_tensors(receiver):
    report = receiver.receive()
    assert not report.full
    return report.num_tensors


def test_a_trained_name_that_is_not_there_is_reported(sides):
    sender, receiver, target = sides
    sender.trained = frozenset({"adapter.weight", "adaptor.bias"})
    with raises_code("weight-layout", WeightLayoutError, "1", "'adaptor.bias'"):
        sender.send(weights(0), 0)
    with pytest.raises(IncompleteSyncError) if isinstance(receiver, MemoryReceiver) else no_error():
        assert receiver.receive() is None
    assert same(target, -1)


def no_error():
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda w: [*w, ("more", torch.zeros(1))], ["'more'"]),
        (lambda w: w[:-1], ["'adapter.bias'"]),
        (lambda w: [*w[:-1], (w[-1][0], torch.zeros(9))], ["'adapter.bias'", "(9,)"]),
    ],
)
def test_weights_of_another_model_are_refused(sides, change, names):
    sender, receiver, target = sides
    with raises_code("weight-layout", WeightLayoutError, *names):
        sender.send(change(weights(0)), 0)
        receiver.receive()
    assert same(target, -1)


def test_a_bucket_has_bytes():
    with raises_code("weight-sync-settings", EmbodrlError, "bucket_bytes", "0"):
        MemorySender([], bucket_bytes=0)


def test_a_collective_needs_somebody_to_send_to(tmp_path):
    with raises_code("weight-sync-settings"):
        SyncGroup(f"file://{tmp_path}/meeting", 0, 1)


# -- memory: what goes wrong on the way -------------------------------------------------------------------------------


def messages_of(sender):
    """Take all messages out of the pipe."""
    pipe = sender.pipes[0]
    return [pipe.get(0.0) for _ in range(len(pipe._values))]


def change_bytes(messages):
    messages[2]["tensors"]["layers.1.weight"].view(-1)[3] += 1


@pytest.mark.parametrize(
    ("spoil", "error", "names"),
    [
        (lambda m: m.pop(2), IncompleteSyncError, ["bucket 2", 1]),
        (lambda m: m.pop(-2), IncompleteSyncError, [16]),
        (lambda m: m.pop(-1), IncompleteSyncError, ["5 buckets"]),
        (lambda m: m.pop(0), IncompleteSyncError, ["header"]),
        (change_bytes, WeightChecksumError, ["'layers.1.weight'"]),
    ],
)
def test_a_torn_stream_leaves_the_old_version(spoil, error, names):
    sender, receiver, target = by_memory(verify=True)
    sender.send(weights(0), 0)
    receiver.receive()
    sender.send(weights(1), 1)
    messages = messages_of(sender)
    assert len(messages) == 7
    spoil(messages)
    for sent in messages:
        sender.pipes[0].put(sent)
    with raises_code(error.code, error, *names):
        receiver.receive()
    assert same(target, 0)
    assert receiver.receive() is None  # what was left of it is passed over
    sender.send(weights(2), 2)
    assert receiver.receive().version == 2 and same(target, 2)


def test_a_sync_that_another_cuts_short_is_reported_and_the_other_applied():
    sender, receiver, target = by_memory()
    sender.send(weights(0), 0)
    cut = messages_of(sender)[:3]
    sender.send(weights(1), 1)
    for message in cut + messages_of(sender):
        sender.pipes[0].put(message)
    with raises_code("incomplete-sync", IncompleteSyncError, "0", "2", "1"):
        receiver.receive()
    assert receiver.receive().version == 1 and same(target, 1)


def test_a_stream_that_goes_back_is_refused():
    sender, receiver, target = by_memory()
    sender.send(weights(5), 5)
    receiver.receive()
    sender.version = None  # a trainer that was started again
    sender.send(weights(4), 4)
    with raises_code("weight-version", WeightVersionError, "4", "5"):
        receiver.receive()
    assert same(target, 5) and receiver.receive() is None


def test_a_new_receiver_needs_a_full_version():
    sender, _, _ = by_memory(ADAPTERS)
    sender.send(weights(0), 0)
    messages_of(sender)
    target = Target()
    late = MemoryReceiver(target, sender.pipes[0], stall_timeout_s=0.0)
    sender.send(weights(1), 1)
    with raises_code("weight-version", WeightVersionError, "0"):
        late.receive()
    assert same(target, -1)
    sender.send(weights(2), 2, full=True)
    assert late.receive().version == 2 and same(target, 2)


def test_a_receiver_that_takes_nothing_is_named():
    pipes = [LocalChannel("weights_0", 64), LocalChannel("weights_1", 3)]
    with raises_code("incomplete-sync", IncompleteSyncError, "1", "'weights_1'", "3"):
        MemorySender(pipes, bucket_bytes=2048, stall_timeout_s=0.0).send(weights(0), 0)


class SlowPipe:
    """Has room only for those who wait."""

    def __init__(self):
        self.messages = []

    def put(self, value, timeout_s=None):
        if not timeout_s:
            raise ChannelTimeout("full")
        self.messages.append(value["sync"])


def test_a_slow_receiver_is_notified_that_the_sender_failed():
    def stream():
        yield from weights(0)[:5]
        raise OSError("the disk is gone")

    pipe = SlowPipe()
    with pytest.raises(OSError, match="the disk is gone"):
        MemorySender([pipe], bucket_bytes=2048, stall_timeout_s=5.0).send(stream(), 0)
    assert pipe.messages == ["begin", "bucket", "end"]


def test_the_rest_is_gathered_when_sending_fails():
    """Other ranks of a sharded trainer take part in gathering to the end, and would wait for this one."""
    seen = []

    def stream():
        for name, tensor in weights(0):
            seen.append(name)
            yield name, tensor

    with pytest.raises(IncompleteSyncError):
        MemorySender([LocalChannel("weights", 2)], bucket_bytes=2048, stall_timeout_s=0.0).send(stream(), 0)
    assert seen == [name for name, _ in weights(0)]


def test_the_first_error_of_a_sync_is_the_one_that_is_raised():
    """What is left is gathered with the other ranks; that this fails too is a note on the error."""

    def stream():
        yield from list(weights(0))[:3]
        raise RuntimeError("a rank has gone")

    def check():
        raise WorkerDied("rollout[1] was killed")

    sender = MemorySender([LocalChannel("weights", 1)], bucket_bytes=8, stall_timeout_s=600)
    with pytest.raises(WorkerDied) as caught:
        sender.send(stream(), 0, check=check)
    assert caught.value.__notes__ == ["gathering the remaining weights failed, too: RuntimeError: a rank has gone"]


def test_a_receiver_that_has_gone_is_not_waited_for():
    """Its pipe stays full."""

    def check():
        raise WorkerDied("rollout[1] was killed")

    sender = MemorySender([LocalChannel("weights", 1)], bucket_bytes=2048, stall_timeout_s=600)
    with pytest.raises(WorkerDied):
        sender.send(weights(0), 0, check=check)


# -- collective: what goes wrong on the way ---------------------------------------------------------------------------


class Tape(NoGroup):
    """Keeps what the sender says, for a receiver that comes later; all others agree with everything."""

    def __init__(self):
        self.said, self.votes = [], []

    def broadcast(self, buffer):
        self.said.append(buffer.clone())

    def describe(self, content=b""):
        self.said.append(content)
        return content


class Playback(Tape):
    def __init__(self, said):
        super().__init__()
        self.said = said

    def announced(self, number, timeout_s):
        return bool(self.said)

    def broadcast(self, buffer):
        buffer.copy_(self.said.pop(0))

    def describe(self, content=b""):
        return self.said.pop(0)

    def all_agree(self, agree):
        self.votes.append(agree)
        return agree


def replace_bytes(buffer, old, new):
    buffer.copy_(torch.frombuffer(bytearray(buffer.numpy().tobytes().replace(old, new, 1)), dtype=torch.uint8))


def test_packed_buckets_bring_every_tensor():
    tape, target = Tape(), Target()
    CollectiveSender(tape, bucket_bytes=3000, verify=True).send(weights(1), 1)
    assert CollectiveReceiver(target, Playback(tape.said), layout_of(target.net)).receive().version == 1
    assert same(target, 1)


@pytest.mark.parametrize(
    ("spoil", "error", "names"),
    [
        (lambda said: said[2][-1:].add_(1), WeightChecksumError, []),
        (lambda said: replace_bytes(said[2], b"F32", b"F99"), IncompleteSyncError, ["bucket 0", "F99"]),
        (lambda said: replace_bytes(said[2], b"[0,", b"[4,"), IncompleteSyncError, ["I64"]),
        (lambda said: replace_bytes(said[2], b"[16, 16]", b"[16, 61]"), IncompleteSyncError, ["F32"]),
        (
            lambda said: replace_bytes(said[2], b"data_offsets", b"dato_offsets"),
            IncompleteSyncError,
            ["'data_offsets'"],
        ),
        (lambda said: [said.pop(3), said.pop(3)], IncompleteSyncError, ["bucket 2", 1]),
        (lambda said: [said.pop(-2), said.pop(-2)], IncompleteSyncError, ["4 of 5 buckets"]),
    ],
)
def test_a_torn_broadcast_is_voted_down(spoil, error, names):
    tape, target = Tape(), Target()
    CollectiveSender(tape, bucket_bytes=2048, verify=True).send(weights(1), 1)
    spoil(tape.said)
    group = Playback(tape.said)
    with raises_code(error.code, error, *names):
        CollectiveReceiver(target, group, layout_of(target.net)).receive()
    assert same(target, -1) and group.votes == [False] and not group.said
