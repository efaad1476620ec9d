"""The rollout backend "remote": servers act with the weights of the run, whatever becomes of the servers."""

import asyncio
import contextlib
import threading

import numpy as np
import pytest
import torch
from served import TOKEN, MeanPolicy, served

from embodrl.config.schema import Config, RolloutConfig, with_sections
from embodrl.errors import RemotePolicyError
from embodrl.hybrid_engines.rollout.remote.engine import RemoteRolloutEngine, ServedWeights
from embodrl.hybrid_engines.rollout.remote.spec import RemoteRolloutConfig
from embodrl.hybrid_engines.weight_sync.disk import DiskSender
from embodrl.types import Observation, PolicyOutput

pytest.importorskip("aiohttp", reason="the extra serve is not installed")


class Drawing(MeanPolicy):
    """MeanPolicy whose log-probs are numbers that each row draws, and that keeps what it saw."""

    draws_by_row = True
    together: threading.Barrier | None = None  # of the servers

    def predict_action_batch(self, observation, mode, sampling, generator=None, compute_values=True):
        if self.together is not None:
            self.together.wait()
        output = super().predict_action_batch(observation, "eval", sampling)
        rows = generator.rows if hasattr(generator, "rows") else (generator,) * observation.batch_size
        drawn = torch.zeros(output.actions.shape)
        if mode == "train":
            drawn = torch.stack([torch.rand(output.actions.shape[1:], generator=row) for row in rows])
        values = torch.from_numpy(output.actions[:, :1, 0]) if compute_values else None
        return PolicyOutput(output.actions, drawn, values, {"seen": torch.from_numpy(observation.images)})


@contextlib.contextmanager
def servers(monkeypatch, *ports: int, count: int = 1):
    """Run servers in a thread; yield their URLs, and a function that ends one."""
    monkeypatch.setattr("served.MeanPolicy", Drawing)
    monkeypatch.setenv("EMBODRL_TOKEN", TOKEN)
    loop, ready = asyncio.new_event_loop(), threading.Event()
    monkeypatch.setattr(loop, "add_signal_handler", lambda *arguments: None)  # the main thread has them
    urls, ends, ended, tasks = [], [], [], []

    async def one(number: int) -> None:
        async with served("http", port=ports[number] if ports else 0) as server:
            urls.append(server.urls["http"])
            end, over = asyncio.Event(), threading.Event()
            ends.append(end)
            ended.append(over)
            if len(urls) == count:
                ready.set()
            await end.wait()
        over.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        tasks.extend(loop.create_task(one(number)) for number in range(count))
        loop.run_until_complete(asyncio.wait(tasks))

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)

    def stop(number: int) -> None:
        """End it; one that a request reaches meanwhile answers late, if its process lives on as this one does."""
        if not ended[number].is_set():
            loop.call_soon_threadsafe(ends[number].set)
            assert ended[number].wait(60)

    try:
        yield urls, stop
    finally:
        for number in range(count):
            stop(number)
        thread.join(60)


def engine(urls, weights, is_ahead=False, **settings) -> RemoteRolloutEngine:
    remote = RemoteRolloutConfig(urls=tuple(urls), **settings)
    settings_class = with_sections(RolloutConfig, {"remote": RemoteRolloutConfig})
    rollout = settings_class.model_validate({"backend": "remote", "remote": remote, "publish_weights": True})
    sampling = Config().algorithm.sampling
    return RemoteRolloutEngine(Drawing(), rollout, sampling, 3, weights=ServedWeights(weights, is_ahead))


def publish(weights, acting: RemoteRolloutEngine, version: int, drop: bool = False) -> None:
    """As a run does after an update: the weights' offset is ten times their version."""
    acting.policy.offset.data.fill_(10 * version)
    sender = DiskSender(weights)
    if drop:
        sender.drop_newer(version - 1)
    sender.send(acting.policy.named_parameters(), version)
    acting.update_weights(acting.policy.named_parameters(), version)


def seen(*pixels: int) -> Observation:
    images = np.stack([np.full((1, 4, 4, 3), pixel, np.uint8) for pixel in pixels])
    count = len(pixels)
    return Observation(images, np.zeros((count, 0), np.float32), ["push"] * count, np.zeros(count, np.int32))


def firsts(output: PolicyOutput) -> list[float]:
    return [round(float(value), 3) for value in output.actions[:, 0, 0]]


def test_servers_act_with_the_newest_weights_and_answer_all_of_an_update(tmp_path, monkeypatch):
    with servers(monkeypatch, count=2) as (urls, _):
        acting = engine(urls, tmp_path)
        for version in (0, 1, 4):
            publish(tmp_path, acting, version)
            output = acting.act(seen(7, 8, 9), compute_values=True)
            base = 10 * version + 0.4
            assert firsts(output) == pytest.approx([7 + base, 8 + base, 9 + base]) and output.version == version
            assert output.values is not None and output.values.shape == (3, 1)
            assert (output.forward_inputs["seen"].numpy() == seen(7, 8, 9).images).all()
        before = acting.random_state()
        for decoding in ("greedy", "mean"):
            assert acting.decide(seen(7), decoding).version == 4
        assert acting.random_state() == before  # evaluations draw nothing of the run's
        # What is drawn follows from the run's seed, and not from who computes it.
        other = engine(urls[:1], tmp_path)
        other.update_weights([], 4)
        drawn = [
            one.decide(seen(7, 8, 9), "sampled", one.row_generators([[1], [2], [3]])).logprobs
            for one in (acting, other)
        ]
        assert (drawn[0] == drawn[1]).all() and len({row.mean().item() for row in drawn[0]}) == 3
        assert acting.random_state() == before
        again, once = engine(urls, tmp_path), other.act(seen(7, 8, 9), False)
        again.update_weights([], 4)
        assert (again.act(seen(7, 8, 9), False).logprobs == once.logprobs).all()
        # A run that is resumed goes back, and publishes other weights under a version that was there.
        publish(tmp_path, acting, 2, drop=True)
        assert firsts(acting.act(seen(7), False)) == pytest.approx([27.4])


def test_ahead_of_training_newer_weights_do_and_are_named(tmp_path, monkeypatch):
    with servers(monkeypatch) as (urls, _):
        acting, other = engine(urls, tmp_path, is_ahead=True), engine(urls, tmp_path)
        publish(tmp_path, acting, 0)
        assert acting.act(seen(7), False).version == 0
        publish(tmp_path, other, 3)
        assert other.act(seen(7), False).version == 3
        output = acting.act(seen(7), False)  # which has not heard of it
        assert output.version == 3 and firsts(output) == pytest.approx([37.4])


def test_ahead_of_training_any_idle_server_acts(tmp_path, monkeypatch):
    with servers(monkeypatch, count=2) as (urls, _):
        acting = engine(urls, tmp_path, is_ahead=True)
        publish(tmp_path, acting, 0)
        found: dict[int, PolicyOutput] = {}
        monkeypatch.setattr(Drawing, "together", threading.Barrier(2, timeout=60))  # neither answers before both ask
        stages = [
            threading.Thread(target=lambda stage=stage: found.update({stage: acting.act(seen(stage), False)}))
            for stage in (1, 2)
        ]
        for stage in stages:
            stage.start()
        for stage in stages:
            stage.join(120)
        assert firsts(found[1]) == pytest.approx([1.4]) and firsts(found[2]) == pytest.approx([2.4])


def test_a_server_that_ends_leaves_its_rows_to_the_others_and_comes_back(tmp_path, monkeypatch):
    with servers(monkeypatch, count=2) as (urls, stop):
        acting = engine(urls, tmp_path)
        publish(tmp_path, acting, 0)
        acting.act(seen(1, 2), False)
        stop(0)
        for _ in range(3):
            assert firsts(acting.act(seen(1, 2, 3), False)) == pytest.approx([1.4, 2.4, 3.4])
        port = int(urls[0].rpartition(":")[2])
        with servers(monkeypatch, port) as (again, _):
            assert again == urls[:1]
            publish(tmp_path, acting, 5)  # the server that was started once more has the weights that it began with
            for _ in range(2):
                assert firsts(acting.act(seen(1, 2, 3), False)) == pytest.approx([51.4, 52.4, 53.4])


def test_where_no_server_is_left_the_run_waits_for_one(tmp_path, monkeypatch):
    with servers(monkeypatch) as (urls, _):
        acting = engine(urls, tmp_path)
        publish(tmp_path, acting, 0)
        acting.act(seen(1), False)
    found: list[list[float]] = []
    thread = threading.Thread(target=lambda: found.append(firsts(acting.act(seen(1, 2), False))))
    thread.start()
    with servers(monkeypatch, int(urls[0].rpartition(":")[2])):
        thread.join(60)
    assert found == [pytest.approx([1.4, 2.4])]


def test_what_can_not_go_on_is_an_error(tmp_path, monkeypatch):
    with servers(monkeypatch) as (urls, _):
        monkeypatch.setattr("embodrl.hybrid_engines.rollout.remote.engine._PAUSE_S", 0.0)
        acting = engine(urls, tmp_path / "nothing")
        with pytest.raises(RemotePolicyError) as raised:  # no weights are there
            acting.act(seen(1), False)
        assert raised.value.code == "remote-weights"
        publish(tmp_path / "nothing", acting, 0)
        with pytest.raises(RemotePolicyError) as raised:
            acting.act(
                Observation(seen(1).images, np.full((1, 1), np.nan, np.float32), ["push"], np.zeros(1, np.int32)), False
            )
        assert raised.value.code == "remote-refused"
    acting = engine(urls, tmp_path, timeout_s=0.1)
    with pytest.raises(RemotePolicyError) as raised:
        acting.act(seen(1), False)
    assert raised.value.code == "remote-unreachable"
