"""Weight sync within one process: buckets, versions, what is refused, and what stays when a sync is torn."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from sync_parts import ADAPTERS, Net, PeakCounter, Target

from embodrl.errors import (
    ChannelTimeout,
    EmbodrlError,
    TornSyncError,
    WeightChecksumError,
    WeightLayoutError,
    WeightSyncError,
    WeightVersionError,
)
from embodrl.hybrid_engines.weight_sync.buckets import buckets, checksum, layout_of, num_bytes, trained_names
from embodrl.hybrid_engines.weight_sync.choice import choose_weight_sync, uses_nccl
from embodrl.hybrid_engines.weight_sync.collective import CollectiveSender
from embodrl.hybrid_engines.weight_sync.disk import DiskReceiver, DiskSender
from embodrl.hybrid_engines.weight_sync.group import SyncGroup
from embodrl.hybrid_engines.weight_sync.memory import MemoryReceiver, MemorySender
from embodrl.hybrid_engines.weight_sync.shared import SharedReceiver, SharedSender
from embodrl.scheduler.channel import LocalChannel
from embodrl.scheduler.placement import ProcessPlace


def weights(version, only=None):
    return list(Net().become(version, only).state_dict().items())


def same(target, version):
    return target.version == version and target.net.sums() == Net().become(version).sums()


def by_memory(trained=None, bucket_bytes=2048, verify=False):
    pipe, target = LocalChannel("weights", 64), Target()
    sender = MemorySender([pipe], trained, bucket_bytes, verify, stall_timeout_s=0.0)
    return sender, MemoryReceiver(target, pipe, layout_of(target.net), stall_timeout_s=0.0), target


def by_disk(tmp_path, trained=None, bucket_bytes=2048, keep=2, **of_target):
    target = Target(**of_target)
    sender = DiskSender(tmp_path, trained, bucket_bytes, keep)
    return sender, DiskReceiver(target, tmp_path, layout_of(target.net)), target


def by_sharing(trained=None):
    target = Target()
    receiver = SharedReceiver(target, layout_of(target.net))
    return SharedSender([receiver], trained), receiver, target


@pytest.fixture(params=["shared", "memory", "disk"])
def sides(request, tmp_path):
    make = {"shared": by_sharing, "memory": by_memory, "disk": lambda: by_disk(tmp_path)}
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
    # A bucket of two, and the one that did not fit; those packed into the buffer of a collective are free at once.
    assert counter.peak <= (2 * size if kind == "collective" else 3 * size)


class NoGroup:
    """Of nobody."""

    device, broken = torch.device("cpu"), False

    def announce(self, number):
        pass

    def describe(self, value):
        return value

    def broadcast(self, buffer):
        assert buffer.numel() <= 10_000

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
        with pytest.raises(WeightVersionError, match=f"version {version} can't follow version 4"):
            sender.send(weights(version), version)
    assert same(target, 4)


@pytest.mark.parametrize("kind", ["shared", "memory", "disk"])
def test_only_what_trains_travels_after_the_first_sync(tmp_path, kind):
    make = {"shared": by_sharing, "memory": by_memory, "disk": lambda names: by_disk(tmp_path, names)}
    sender, receiver, target = make[kind](ADAPTERS)
    sender.send(weights(0), 0)
    assert receiver.receive().full
    assert sender.send(weights(1), 1).num_tensors == receiver_tensors(receiver) == 2
    assert target.net.sums() == Net().become(0).become(1, ADAPTERS).sums()


def receiver_tensors(receiver):
    report = receiver.receive()
    assert not report.full
    return report.num_tensors


def test_a_trained_name_that_is_not_there_is_told(sides):
    sender, receiver, target = sides
    sender.trained = frozenset({"adapter.weight", "adaptor.bias"})
    with pytest.raises(WeightLayoutError, match=r"1 trained names are not among the weights, e\.g\. 'adaptor\.bias'"):
        sender.send(weights(0), 0)
    with pytest.raises(TornSyncError) if isinstance(receiver, MemoryReceiver) else no_error():
        assert receiver.receive() is None
    assert same(target, -1)


def no_error():
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: [*w, ("more", torch.zeros(1))], r"1 unknown names, e\.g\. 'more'"),
        (lambda w: w[:-1], r"1 names are missing, e\.g\. 'adapter\.bias'"),
        (lambda w: [*w[:-1], (w[-1][0], torch.zeros(9))], r"1 have other shapes, e\.g\. 'adapter\.bias' is \(9,\)"),
    ],
)
def test_weights_of_another_model_are_refused(sides, change, message):
    sender, receiver, target = sides
    with pytest.raises(WeightLayoutError, match=message):
        sender.send(change(weights(0)), 0)
        receiver.receive()
    assert same(target, -1)


def test_shards_can_not_be_shared():
    sender, _, target = by_sharing()
    shard = torch.zeros(1)
    shard.full_tensor = lambda: shard
    with pytest.raises(WeightLayoutError, match=r"'layers\.0\.weight' is a shard"):
        sender.send([("layers.0.weight", shard)], 0)
    assert same(target, -1)


def test_a_bucket_has_bytes():
    with pytest.raises(EmbodrlError, match="bucket_bytes is 0"):
        MemorySender([], bucket_bytes=0)


def test_a_collective_needs_somebody_to_send_to(tmp_path):
    with pytest.raises(EmbodrlError, match="nobody to send to"):
        SyncGroup(f"file://{tmp_path}/meeting", 0, 1)


# -- memory: what goes wrong on the way -------------------------------------------------------------------------------


def messages_of(sender):
    """Take all messages out of the pipe."""
    pipe = sender.pipes[0]
    return [pipe.get(0.0) for _ in range(pipe.capacity - pipe.free_places())]


def change_bytes(messages):
    messages[2]["tensors"]["layers.1.weight"].view(-1)[3] += 1


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda m: m.pop(2), TornSyncError, "bucket 2 came where 1 was due"),
        (lambda m: m.pop(-2), TornSyncError, r"buckets with \d+ of 16 tensors came"),
        (lambda m: m.pop(-1), TornSyncError, "stopped after 5 buckets: .*stayed empty"),
        (lambda m: m.pop(0), TornSyncError, "came without their beginning"),
        (change_bytes, WeightChecksumError, r"'layers\.1\.weight' has the checksum"),
    ],
)
def test_a_torn_stream_leaves_the_old_version(spoil, error, message):
    sender, receiver, target = by_memory(verify=True)
    sender.send(weights(0), 0)
    receiver.receive()
    sender.send(weights(1), 1)
    messages = messages_of(sender)
    assert len(messages) == 7
    spoil(messages)
    for sent in messages:
        sender.pipes[0].put(sent)
    with pytest.raises(error, match=message):
        receiver.receive()
    assert same(target, 0)
    assert receiver.receive() is None  # what was left of it is passed over
    sender.send(weights(2), 2)
    assert receiver.receive().version == 2 and same(target, 2)


def test_a_sync_that_another_cuts_short_is_told_and_the_other_taken_over():
    sender, receiver, target = by_memory()
    sender.send(weights(0), 0)
    cut = messages_of(sender)[:3]
    sender.send(weights(1), 1)
    for message in cut + messages_of(sender):
        sender.pipes[0].put(message)
    with pytest.raises(TornSyncError, match="version 0 stopped after 2 buckets: version 1 began"):
        receiver.receive()
    assert receiver.receive().version == 1 and same(target, 1)


def test_a_stream_that_goes_back_is_refused():
    sender, receiver, target = by_memory()
    sender.send(weights(5), 5)
    receiver.receive()
    sender.version = None  # a trainer that was started again
    sender.send(weights(4), 4)
    with pytest.raises(WeightVersionError, match="version 4 came after version 5"):
        receiver.receive()
    assert same(target, 5) and receiver.receive() is None


def test_a_new_receiver_needs_a_full_version():
    sender, _, _ = by_memory(ADAPTERS)
    sender.send(weights(0), 0)
    messages_of(sender)
    target = Target()
    late = MemoryReceiver(target, sender.pipes[0], stall_timeout_s=0.0)
    sender.send(weights(1), 1)
    with pytest.raises(WeightVersionError, match="builds on version 0; here is no full version"):
        late.receive()
    assert same(target, -1)
    sender.send(weights(2), 2, full=True)
    assert late.receive().version == 2 and same(target, 2)


def test_a_receiver_that_takes_nothing_is_named():
    pipes = [LocalChannel("weights_0", 64), LocalChannel("weights_1", 3)]
    with pytest.raises(TornSyncError, match=r"version 0 did not reach receiver 1: channel 'weights_1' \(3 places\)"):
        MemorySender(pipes, bucket_bytes=2048, stall_timeout_s=0.0).send(weights(0), 0)


class SlowPipe:
    """Has room only for those who wait."""

    def __init__(self):
        self.messages = []

    def put(self, value, timeout_s=None):
        if not timeout_s:
            raise ChannelTimeout("full")
        self.messages.append(value["sync"])


def test_a_slow_receiver_is_told_that_the_sender_failed():
    def stream():
        yield from weights(0)[:5]
        raise OSError("the disk is gone")

    pipe = SlowPipe()
    with pytest.raises(OSError, match="the disk is gone"):
        MemorySender([pipe], bucket_bytes=2048, stall_timeout_s=5.0).send(stream(), 0)
    assert pipe.messages == ["begin", "bucket", "abort"]


def test_the_rest_is_gathered_when_sending_fails():
    """Other ranks of a sharded trainer take part in gathering to the end, and would wait for this one."""
    seen = []

    def stream():
        for name, tensor in weights(0):
            seen.append(name)
            yield name, tensor

    with pytest.raises(TornSyncError):
        MemorySender([LocalChannel("weights", 2)], bucket_bytes=2048, stall_timeout_s=0.0).send(stream(), 0)
    assert seen == [name for name, _ in weights(0)]


# -- disk -------------------------------------------------------------------------------------------------------------


def version_dir(tmp_path, version):
    return tmp_path / f"v{version:06d}"


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def test_a_version_is_safetensors_with_a_manifest(tmp_path):
    sender, _, _ = by_disk(tmp_path)
    sender.send(weights(12), 12)
    path = tmp_path / "v000012"
    manifest = json.loads((path / "manifest.json").read_text())
    stored = {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}
    wanted = dict(weights(12))
    assert stored.keys() == manifest["tensors"].keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(stored[name], tensor) and stored[name].dtype == tensor.dtype
        assert manifest["tensors"][name]["crc32"] == checksum(tensor)
        assert manifest["tensors"][name]["shape"] == list(tensor.shape)
    assert (path / "STABLE").is_file() and len(list(path.glob("*.safetensors"))) == 5


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda p: truncate(p / "bucket_00001.safetensors"), TornSyncError, r"bucket_00001\.safetensors has \d+ bytes"),
        (lambda p: (p / "bucket_00002.safetensors").unlink(), TornSyncError, "bucket_00002.safetensors is missing"),
        (lambda p: flip(p / "bucket_00001.safetensors"), WeightChecksumError, r"'layers\.1\.weight' has the checksum"),
        (lambda p: flip(p / "manifest.json", 40), TornSyncError, "manifest.json is not the one that STABLE"),
        (lambda p: (p / "manifest.json").unlink(), TornSyncError, "manifest.json is missing"),
        (lambda p: truncate(p / "STABLE"), TornSyncError, "can't be read"),
    ],
)
def test_a_damaged_version_leaves_the_old_one(tmp_path, spoil, error, message):
    sender, receiver, target = by_disk(tmp_path)
    sender.send(weights(0), 0)
    receiver.receive()
    sender.send(weights(1), 1)
    spoil(version_dir(tmp_path, 1))
    for _ in range(2):  # as often as one asks
        with pytest.raises(error, match=message):
            receiver.receive()
    assert same(target, 0)
    sender.send(weights(2), 2)
    assert receiver.receive().version == 2 and same(target, 2)


def test_what_is_not_marked_stable_is_not_there(tmp_path):
    sender, receiver, target = by_disk(tmp_path)
    sender.send(weights(0), 0)
    receiver.receive()
    sender.send(weights(1), 1)
    (version_dir(tmp_path, 1) / "STABLE").unlink()
    assert receiver.receive() is None and same(target, 0)
    again = DiskSender(tmp_path)  # a trainer that was killed before it could mark it
    again.send(weights(1), 1)
    assert receiver.receive().version == 1 and same(target, 1)


def test_a_reader_skips_versions_that_it_was_too_slow_for(tmp_path):
    sender, receiver, target = by_disk(tmp_path)
    for version in range(4):
        sender.send(weights(version), version)
    assert receiver.receive().version == 3 and same(target, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000002", "v000003"]


def test_a_full_version_stays_while_others_build_on_it(tmp_path):
    sender, receiver, target = by_disk(tmp_path, ADAPTERS)
    for version in range(5):
        sender.send(weights(version), version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000000", "v000003", "v000004"]
    report = receiver.receive()  # a late one takes both over at once
    assert (report.version, report.num_tensors) == (4, len(weights(0)) + 2)
    assert target.net.sums() == Net().become(0).become(4, ADAPTERS).sums()
    sender.send(weights(5), 5, full=True)
    sender.send(weights(6), 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000005", "v000006"]
    assert receiver.receive().version == 6
    assert target.net.sums() == Net().become(5).become(6, ADAPTERS).sums()


def test_a_version_whose_base_is_gone_is_refused(tmp_path):
    sender, receiver, target = by_disk(tmp_path, ADAPTERS)
    sender.send(weights(0), 0)
    sender.send(weights(1), 1)
    (version_dir(tmp_path, 0) / "STABLE").unlink()
    with pytest.raises(WeightVersionError, match="version 1 holds only what trains and builds on version 0"):
        receiver.receive()
    assert same(target, -1)


@pytest.mark.parametrize("fail_after", [0, 7])
def test_storage_that_fails_while_the_policy_is_written_brings_the_old_version_back(tmp_path, fail_after):
    sender, receiver, target = by_disk(tmp_path)
    sender.send(weights(0), 0)
    receiver.receive()
    sender.send(weights(1), 1)
    whole = target.update_weights

    def fail_once(stream, version):
        target.update_weights = whole
        Target(target.net, fail_after).update_weights(stream, version)

    target.update_weights = fail_once
    with pytest.raises(OSError, match="storage is gone"):
        receiver.receive()
    assert same(target, 0) and receiver.intact
    assert receiver.receive().version == 1 and same(target, 1)


def test_a_first_version_that_fails_midway_is_told_as_such(tmp_path):
    sender, receiver, target = by_disk(tmp_path, fail_after=7)
    sender.send(weights(0), 0)
    with pytest.raises(OSError) as caught:
        receiver.receive()
    assert not receiver.intact and "must not act" in caught.value.__notes__[0]
    target.fail_after = None
    receiver.receive()
    assert receiver.intact and same(target, 0)


def test_versions_after_the_checkpoint_that_a_run_continues_from_go(tmp_path):
    sender, receiver, target = by_disk(tmp_path, keep=3)
    for version in (1, 2, 3):
        sender.send(weights(version), version)
    receiver.receive()
    again = DiskSender(tmp_path)
    with pytest.raises(WeightVersionError, match="version 2 can't follow version 3"):
        again.send(weights(2), 2)
    again.drop_newer(1)
    again.send(weights(2), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000001", "v000002"]
    with pytest.raises(WeightVersionError, match="version 2 came after version 3"):
        receiver.receive()
    assert same(target, 3)


def test_a_directory_that_can_not_be_written_is_told(tmp_path):
    (tmp_path / "weights").write_text("a file")
    with pytest.raises(WeightSyncError, match="weights of version 0 could not be written to"):
        DiskSender(tmp_path / "weights").send(weights(0), 0)


# -- choice -----------------------------------------------------------------------------------------------------------


class Placed:
    """``actor`` and ``rollout`` as (node, device) pairs; a device of None is the processor."""

    def __init__(self, actor, rollout):
        self.places = {"actor": actor, "rollout": rollout}

    def of(self, component, /):
        return [
            ProcessPlace(component, rank, node, () if device is None else (device,))
            for rank, (node, device) in enumerate(self.places[component])
        ]


CPU = Placed([(0, None)], [(0, None)])
DISJOINT = Placed([(0, 0), (0, 1)], [(0, 2), (0, 3)])
SAME_GPUS = Placed([(0, 0), (1, 0)], [(0, 0), (1, 0)])
FAR = Placed([(0, 0)], [(1, 0)])


@pytest.mark.parametrize(
    ("placed", "same_process", "wanted"),
    [
        (CPU, True, "shared"),
        (CPU, False, "memory"),
        (DISJOINT, False, "memory"),
        (SAME_GPUS, False, "memory"),
        (FAR, False, "collective"),
    ],
)
def test_the_kind_follows_from_the_placement(placed, same_process, wanted):
    assert choose_weight_sync(placed, same_process) == wanted


@pytest.mark.parametrize(
    ("kind", "placed", "same_process", "message"),
    [
        ("shared", CPU, False, "different processes, which share no memory"),
        ("collective", CPU, True, "one process, which has nobody to send to"),
        ("memory", FAR, False, "machine 1 has a rollout and no trainer"),
        ("memroy", CPU, False, r"there is no weight sync 'memroy'(.|\n)*did you mean 'memory'"),
    ],
)
def test_a_kind_that_can_not_work_is_refused(kind, placed, same_process, message):
    with pytest.raises(EmbodrlError, match=message):
        choose_weight_sync(placed, same_process, kind)


def test_a_kind_that_can_work_is_taken():
    for kind in ("memory", "collective", "disk"):
        assert choose_weight_sync(DISJOINT, False, kind) == kind


def test_nccl_needs_a_gpu_for_each():
    assert [uses_nccl(placed) for placed in (CPU, DISJOINT, SAME_GPUS, FAR)] == [False, True, False, True]
