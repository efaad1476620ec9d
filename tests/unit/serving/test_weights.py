"""Newer weights of a run are taken up while clients ask."""

import asyncio
import os

import pytest
from served import MeanPolicy, engine_of, served, wanted
from test_core import seen

from embodrl.errors import EmbodrlError, WeightSyncError
from embodrl.hybrid_engines.weight_sync import follower as module
from embodrl.hybrid_engines.weight_sync.disk import DiskSender, versions_in
from embodrl.hybrid_engines.weight_sync.follower import WeightFollower, WeightSource


def send(directory, policy: MeanPolicy, version: int) -> None:
    """Publish weights whose offset is their version."""
    named = {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}
    named["offset"].fill_(version)
    DiskSender(directory).send(named.items(), version)


def test_versions_are_taken_up_under_load_and_no_request_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    answered: list[int] = []

    async def run():
        async with served("openpi", weights_dir=tmp_path / "weights") as server:
            done = asyncio.Event()

            async def client(number: int) -> None:
                while not done.is_set():
                    chunk = await server.core.act(seen(number), number, "openpi")
                    assert (chunk.actions == wanted(number, "push", offset=float(chunk.version))).all()
                    answered.append(chunk.version)

            clients = [asyncio.create_task(client(number)) for number in range(4)]
            for version in (3, 4, 9):
                await asyncio.to_thread(send, tmp_path / "weights", MeanPolicy(), version)
                while not answered or answered[-1] != version:
                    await asyncio.sleep(0.001)
            done.set()
            await asyncio.gather(*clients)

    asyncio.run(run())
    assert answered == sorted(answered) and set(answered) == {0, 3, 4, 9}


def test_weights_that_another_directory_has_replaced_are_loaded_again(tmp_path):
    """Two processes of one run name directories of their own, one of them a version behind."""
    policy = MeanPolicy()
    source = WeightSource(engine_of(policy))
    left, right = tmp_path / "left", tmp_path / "right"
    for directory, version in ((left, 4), (right, 6), (left, 5)):
        send(directory, MeanPolicy(), version)
        assert source.take(directory, again=True) is not None and policy.offset.item() == version
    assert source.take(right) is None and policy.offset.item() == 5
    assert source.take(right, again=True) is not None and policy.offset.item() == 6
    assert source.take(right, again=True) is None


def test_damaged_weights_are_reported_once_and_the_next_are_taken(tmp_path, caplog):
    policy = MeanPolicy()
    engine = engine_of(policy)
    send(tmp_path, policy, 1)
    damaged = next((tmp_path / "v000001").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    follower = WeightFollower(WeightSource(engine), tmp_path, poll_s=0.001)
    with caplog.at_level("INFO"):
        follower.start()
        while not caplog.records:
            follower.join(0.001)
        follower.join(0.05)
        assert engine.version == 0 and len(caplog.records) == 1
        send(tmp_path, policy, 2)
        while engine.version != 2:
            follower.join(0.001)
        follower.stop()
    assert policy.offset.item() == 2


@pytest.mark.parametrize("name", ["manifest.json", "bucket_00000.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path.parent / "STABLE")])
def test_what_is_no_file_among_the_weights_is_refused_at_once(name, make, tmp_path):
    policy = MeanPolicy()
    source = WeightSource(engine_of(policy))
    send(tmp_path, policy, 3)
    (tmp_path / "v000003" / name).unlink()
    make(tmp_path / "v000003" / name)
    for _ in range(2):  # no lock is kept
        with pytest.raises(WeightSyncError):
            source.take(tmp_path)
    send(tmp_path, policy, 4)
    assert source.take(tmp_path).version == 4


def test_no_error_ends_the_follower(tmp_path, caplog):
    errors = [EmbodrlError("any other"), OSError(5, "Input/output error"), RuntimeError("a bug")]

    def fetch():
        if errors:
            raise errors.pop()

    policy = MeanPolicy()
    follower = WeightFollower(WeightSource(engine_of(policy)), tmp_path, fetch, poll_s=0.001)
    send(tmp_path, policy, 1)
    follower.start()
    while policy.offset.item() != 1 and follower.is_alive():
        follower.join(0.001)
    follower.stop()
    assert policy.offset.item() == 1 and len(caplog.records) >= 3


def test_a_version_has_ascii_digits(tmp_path):
    (tmp_path / "v\u0660\u0660\u0660\u0660\u0660\u0663").mkdir()
    assert versions_in(tmp_path, stable=False) == []
