"""Offloaded tensors come back bit-identical, as the same objects."""

import struct

import pytest
import torch

from embodrl.hybrid_engines.offload import Offload, optimizer_tensors, take_peak_bytes
from embodrl.scheduler.messages import CODEC
from embodrl.storage.files import raw_bytes

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_come_back_bit_exactly_and_are_the_same(device):
    source = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(device)
    kept, view = source.clone(), source[100:200]
    pointless = torch.zeros(0, device=device)
    offload = Offload(lambda: [source, view, pointless])
    report = offload.offload()
    assert offload.is_offloaded and source.untyped_storage().nbytes() == 0
    assert report.before - report.after >= 4000 and report.device.type == device
    assert offload.offload() is None
    back = offload.onload()
    assert not offload.is_offloaded and back.after - back.before >= 4000
    assert torch.equal(source, kept) and torch.equal(view, kept[100:200])
    view.zero_()  # still the same memory
    assert not source[100:200].any()
    assert offload.onload() is None


@pytest.mark.parametrize("device", DEVICES)
def test_training_continues_as_if_nothing_had_been(device):
    def train(with_offload):
        torch.manual_seed(0)
        net = torch.nn.Linear(20, 20).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

        offload = Offload(lambda: [*net.parameters(), *optimizer_tensors(optimizer)])
        for _ in range(3):
            offload.onload()
            net(torch.ones(2, 20, device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if with_offload:
                assert offload.offload() is not None
        offload.onload()
        return [p.detach().clone() for p in net.parameters()]

    for with_it, without in zip(train(True), train(False), strict=True):
        assert torch.equal(with_it, without)


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_begins_again_with_every_reading(device: str) -> None:
    place = torch.device(device)
    take_peak_bytes(place)
    del_later = torch.zeros(1 << 22, device=place)
    del del_later
    first, second = take_peak_bytes(place), take_peak_bytes(place)
    if device == "cpu":
        assert first is None and second is None
    else:
        assert first is not None and second is not None and first - second >= 4 << 22


def test_memory_of_others_stays(tmp_path):
    shared = torch.ones(100).share_memory_()
    offload = Offload(lambda: [shared])
    assert offload.offload() is None
    assert shared.sum() == 100


def test_what_was_written_or_sent_can_still_leave() -> None:
    """Tensor.numpy() would have made it stay for good, silently."""
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert bytes(raw_bytes(tensor.t())) == tensor.t().contiguous().numpy().tobytes()
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    data = raw_bytes(tensor)
    assert bytes(data) == struct.pack("6f", *range(6)) and len(raw_bytes(tensor[:0])) == 0
    CODEC.pack(tensor)
    report = Offload(lambda: [tensor]).offload()
    assert report is not None and report.before == 24 and report.after == 0


def test_what_is_away_is_there_for_a_while_and_leaves_again() -> None:
    tensor = torch.arange(4.0)
    memory = Offload(lambda: [tensor])
    with memory.present():
        pass
    assert not memory.is_offloaded, "it was there before"
    memory.offload()
    with pytest.raises(KeyError), memory.present():
        assert not memory.is_offloaded and tensor.tolist() == [0, 1, 2, 3]
        raise KeyError
    assert memory.is_offloaded
    memory.onload()
    assert tensor.tolist() == [0, 1, 2, 3]
