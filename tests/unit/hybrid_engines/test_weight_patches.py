"""Patches: the bits of a whole transfer, fewer bytes, and never on top of another version."""

import pytest
import torch
from expect import raises_code
from sync_parts import ADAPTERS, Target, weights

from embodrl.errors import IncompleteSyncError, WeightChecksumError, WeightVersionError
from embodrl.hybrid_engines.weight_sync.buckets import checksum, layout_of, num_bytes
from embodrl.hybrid_engines.weight_sync.memory import MemoryReceiver, MemorySender
from embodrl.hybrid_engines.weight_sync.patches import WHOLE, apply_patch, make_patch, patch_form
from embodrl.scheduler.channel import LocalChannel

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool)


def by_patches(trained=None, bucket_bytes=2048):
    pipe, target = LocalChannel("weights", 64), Target()
    sender = MemorySender([pipe], trained, bucket_bytes, stall_timeout_s=0.0, patches=True)
    return sender, MemoryReceiver(target, pipe, layout_of(target.net), stall_timeout_s=0.0), target


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


# -- one tensor --------------------------------------------------------------------------------------------------------


def test_the_shortest_form_is_sent():
    tensor = torch.zeros(1000)  # a mask has 125 bytes, a position 4
    assert patch_form(tensor, 0) == ("positions", 0)
    assert patch_form(tensor, 31) == ("positions", 31 * 8)
    assert patch_form(tensor, 32) == ("mask", 125 + 32 * 4)
    assert patch_form(tensor, 968) == ("mask", 125 + 968 * 4)
    assert patch_form(tensor, 969) == ("whole", 4000)
    assert patch_form(tensor, WHOLE) == ("whole", 4000)
    assert patch_form(tensor.bfloat16(), 938) == ("whole", 2000)  # 125 + 1876 bytes
    assert patch_form(torch.zeros(4, dtype=torch.complex128), 1) == ("whole", 64)


def test_a_patch_is_positions_and_bits():
    before = torch.arange(1000, dtype=torch.int32)
    after = before.clone()
    after[[3, 700]] = torch.tensor([-1, 5], dtype=torch.int32)
    data, changed = make_patch(before, after)
    assert changed == 2
    assert data.tolist() == [3, 0, 0, 0, 188, 2, 0, 0, 255, 255, 255, 255, 5, 0, 0, 0]  # 700 = 2 * 256 + 188
    small = torch.zeros(9, dtype=torch.uint8)
    data, changed = make_patch(small, torch.tensor([0, 7, 0, 0, 0, 0, 0, 0, 9], dtype=torch.uint8))
    assert (data.tolist(), changed) == ([0b01000000, 0b10000000, 7, 9], 2)


def test_bits_are_compared_and_not_values():
    before = torch.zeros(100)
    before[2] = float("nan")
    after = before.clone()
    assert make_patch(before, after)[1] == 0
    after[1] = -0.0
    data, changed = make_patch(before, after)
    assert changed == 1 and bits(apply_patch(before, data, changed)) == bits(after)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_updates_arrive_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(3)
    for shape in ((), (0, 4), (1,), (7, 9), (300, 5), (64, 65)):
        for share in (0.0, 0.001, 0.02, 0.2, 0.9, 1.0):
            before = torch.randint(-100, 100, shape, generator=generator).to(dtype)
            other = torch.randn(shape, generator=generator).mul(50).to(dtype)
            after = torch.where(torch.rand(shape, generator=generator) < share, other, before)
            data, changed = make_patch(before, after)
            _, size = patch_form(after, changed)
            assert num_bytes(data) == size <= num_bytes(after)
            found = apply_patch(before, data, changed)
            assert (found.shape, found.dtype, bits(found)) == (after.shape, after.dtype, bits(after))


def test_a_damaged_patch_is_refused():
    before = torch.zeros(1000)
    after = before.clone()
    after[5] = 1.0
    data, changed = make_patch(before, after)
    for wrong, count in ((data[:-1], changed), (data, 2), (data, 1001)):
        with raises_code("incomplete-sync", IncompleteSyncError):
            apply_patch(before, wrong, count)
    outside = data.clone()
    outside[1] = 200  # position 5 + 200 * 256
    with raises_code("incomplete-sync", IncompleteSyncError):
        apply_patch(before, outside, 1)
    mask, changed = make_patch(before, (torch.arange(1000) < 100).float())
    mask[20] = 255
    with raises_code("incomplete-sync", IncompleteSyncError):
        apply_patch(before, mask, changed)


# -- a sync ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_those_of_whole_transfers(dtype):
    """Weights of 0.02 after updates of 1e-6: in bfloat16 few values change, in float32 all of those with gradients."""
    generator = torch.Generator().manual_seed(5)
    pipe = LocalChannel("weights", 64)
    found = {}

    class Engine:
        def update_weights(self, weights, version):
            found.update(weights)

    sender = MemorySender([pipe], None, 4096, stall_timeout_s=0.0, patches=True)
    receiver = MemoryReceiver(Engine(), pipe, stall_timeout_s=0.0)
    master = {name: torch.randn(size, generator=generator) * 0.02 for name, size in (("a", 3000), ("b", 500))}
    shares = []
    for version in range(6):
        sent = {name: tensor.to(dtype) for name, tensor in master.items()}
        sender.send(sent.items(), version)
        report = receiver.receive()
        assert {name: checksum(tensor) for name, tensor in found.items()} == {n: checksum(t) for n, t in sent.items()}
        got = report.received
        assert got.num_values == (3500 if version else 0)
        shares.append(got.num_changed / 3500)
        assert got.num_bytes < report.num_bytes if version else got.num_bytes == report.num_bytes
        master["a"] += torch.randn(3000, generator=generator).sign() * 1e-6
    changed = {torch.float32: (0.8, 3000 / 3500), torch.bfloat16: (0.001, 0.1)}[dtype]
    assert all(changed[0] < share <= changed[1] for share in shares[1:])


def test_only_changed_values_of_what_trains_are_sent():
    sender, receiver, target = by_patches(ADAPTERS)
    sender.send(weights(0), 0)
    first = receiver.receive()
    assert first.received.num_bytes == first.num_bytes and first.received.num_values == 0
    later = dict(weights(0))
    later["adapter.weight"] = later["adapter.weight"].clone()
    later["adapter.weight"][1, 3] += 1
    sender.send(later.items(), 1)
    second = receiver.receive()
    # One of 2 * 16 weights: a position and a value; none of the 2 biases.
    assert vars(second.received) == {"num_bytes": 8, "num_values": 34, "num_changed": 1}
    assert second.num_tensors == 2 and not second.full
    assert target.version == 1 and target.net.sums() == {name: checksum(tensor) for name, tensor in later.items()}


def test_a_receiver_with_another_version_refuses_patches_and_takes_a_full_version():
    sender, receiver, target = by_patches(ADAPTERS)
    sender.send(weights(0), 0)
    receiver.receive()
    sender.send(weights(1, ADAPTERS), 1)
    sender.pipes[0].get(0.0)  # the begin of version 1 is lost
    with raises_code("incomplete-sync", IncompleteSyncError):
        receiver.receive()
    sender.send(weights(2, ADAPTERS), 2)
    with raises_code("weight-version", WeightVersionError, 2, 1, 0):
        receiver.receive()
    assert target.version == 0
    sender.send(weights(3), 3, full=True)
    assert receiver.receive().received.num_values == 0 and target.version == 3
    sender.send(weights(4, ADAPTERS), 4)
    assert receiver.receive().received.num_values == 34 and target.version == 4
    new = MemoryReceiver(Target(), sender.pipes[0], stall_timeout_s=0.0)
    sender.send(weights(5, ADAPTERS), 5)
    with raises_code("weight-version", WeightVersionError):
        new.receive()


def test_a_result_with_other_bits_is_an_error():
    sender, receiver, target = by_patches()
    sender.send(weights(0), 0)
    receiver.receive()
    receiver._copies._tensors["adapter.bias"].view(torch.uint8)[0] ^= 1
    later = dict(weights(0))
    later["adapter.weight"] = later["adapter.weight"] + 1
    sender.send(later.items(), 1)
    with raises_code("weight-checksum", WeightChecksumError, "adapter.bias"):
        receiver.receive()
    assert target.version == 0


def test_after_a_failed_sync_everything_is_sent():
    sender, receiver, target = by_patches(ADAPTERS)
    sender.send(weights(0), 0)
    receiver.receive()

    def broken():
        yield from weights(1, ADAPTERS)[:-1]
        raise OSError("the optimizer is gone")

    with pytest.raises(OSError, match="gone"):
        sender.send(broken(), 1)
    with raises_code("incomplete-sync", IncompleteSyncError):
        receiver.receive()
    sender.send(weights(2, ADAPTERS), 2)
    report = receiver.receive()
    assert report.received.num_values == 0 and report.received.num_bytes == report.num_bytes
    assert target.version == 2
    assert {n: s for n, s in target.net.sums().items() if n in ADAPTERS} == {
        n: checksum(t) for n, t in weights(2, ADAPTERS) if n in ADAPTERS
    }
