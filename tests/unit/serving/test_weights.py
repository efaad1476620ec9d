"""Newer weights of a run are taken up while clients ask."""

import asyncio

from served import MeanPolicy, engine_of, served, wanted
from test_core import seen

from embodrl.hybrid_engines.weight_sync.disk import DiskSender
from embodrl.serving import weights as module
from embodrl.serving.weights import WeightFollower, WeightSource


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


def test_damaged_weights_are_reported_once_and_the_next_are_taken(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    policy = MeanPolicy()
    engine = engine_of(policy)
    send(tmp_path, policy, 1)
    damaged = next((tmp_path / "v000001").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    follower = WeightFollower(WeightSource(engine), tmp_path)
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
