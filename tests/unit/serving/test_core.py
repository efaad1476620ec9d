"""What all protocols share: batches, versions, pauses, and the end."""

import asyncio
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from expect import raises_code
from served import MeanPolicy, config_of, engine_of, wanted

from embodrl.errors import ServingError
from embodrl.processes.ending import REPEAT_S, SecondSignal
from embodrl.serving import core as core_module
from embodrl.serving.core import ModelCore, explain
from embodrl.serving.server import PolicyServer
from embodrl.serving.stall import BatchWatch
from embodrl.types import Observation


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(core_module, "LOOK_S", 0.002)


def seen(pixel: int, text: str = "push", size: int = 4) -> Observation:
    images = np.full((1, 1, size, size, 3), pixel, np.uint8)
    return Observation(images, np.zeros((1, 0), np.float32), [text], np.zeros(1, np.int32))


def with_core(test, **settings):
    """Run a coroutine with a core and its policy."""

    async def run():
        policy = MeanPolicy()
        core = ModelCore(engine_of(policy), config_of("openpi", **settings).serve)
        try:
            return await asyncio.wait_for(test(core, policy), 30)
        finally:
            core.close()

    return asyncio.run(run())


def test_requests_of_several_clients_are_one_forward():
    async def test(core, policy):
        chunks = await asyncio.gather(*(core.act(seen(i), i, "openpi") for i in range(6)))
        for i, chunk in enumerate(chunks):
            assert (chunk.actions == wanted(i, "push")).all() and chunk.batch_size == 6
        assert policy.batches == [6] and (core.batches, core.requests) == (1, 6)

    with_core(test)


@pytest.mark.parametrize(("decoding", "mode"), [("greedy", "eval"), ("mean", "mean")])
def test_answers_are_chosen_as_the_setting_says(decoding, mode):
    async def test(core, policy):
        await core.act(seen(1), 0, "openpi")
        assert policy.mode == mode
        policy.mode = ""
        core.warm_up(seen(1))
        assert policy.mode == mode

    with_core(test, decoding=decoding)


def test_a_free_model_waits_for_the_clients_that_asked_before():
    async def test(core, policy):
        await asyncio.gather(*(core.act(seen(i), i, "openpi") for i in range(3)))
        first = asyncio.create_task(core.act(seen(1), 0, "openpi"))
        second = asyncio.create_task(core.act(seen(2), 1, "openpi"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert policy.batches == [3]  # the third may ask within the second
        chunk = await core.act(seen(3), 2, "openpi")
        assert (await first).batch_size == (await second).batch_size == chunk.batch_size == 3
        core.forget(1)
        core.forget(2)
        assert (await core.act(seen(3), 0, "openpi")).batch_size == 1  # the others are gone: it does not wait

    with_core(test, max_wait_ms=10_000.0)


def test_a_batch_has_at_most_max_batch_size_rows_of_one_shape():
    async def test(core, policy):
        requests = [core.act(seen(i, size=4 if i % 2 else 6), i, "openpi") for i in range(10)]
        chunks = await asyncio.gather(*requests)
        assert all((chunk.actions == wanted(i, "push")).all() for i, chunk in enumerate(chunks))
        assert sorted(policy.batches) == [1, 1, 4, 4]

    with_core(test, max_batch_size=4)


def test_one_bad_observation_does_not_fail_the_others():
    async def test(core, policy):
        texts = ["push", "fail", "pull", "refuse"]
        found = await asyncio.gather(
            *(core.act(seen(7, text), text, "openpi") for text in texts), return_exceptions=True
        )
        for text, chunk in zip(texts, found, strict=True):
            if text in ("push", "pull"):
                assert (chunk.actions == wanted(7, text)).all()
        assert "policy-raised" in explain(found[1]) and "secret" not in explain(found[1])
        assert "test-refused" in explain(found[3]) and "say something else" in explain(found[3])

    with_core(test)


def test_a_client_that_leaves_takes_nothing_with_it():
    async def test(core, policy):
        core.pause()
        tasks = [asyncio.create_task(core.act(seen(i), i, "openpi")) for i in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        core.resume()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[1], asyncio.CancelledError)
        assert (found[2].actions == wanted(2, "push")).all() and policy.batches == [2]

    with_core(test)


def test_a_paused_core_answers_after_it_is_resumed():
    async def test(core, policy):
        core.pause()
        task = asyncio.create_task(core.act(seen(1), 1, "openpi"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not policy.batches and core.is_paused
        core.resume()
        assert ((await task).actions == wanted(1, "push")).all()

    with_core(test)


def test_weights_change_between_two_batches_and_replies_name_their_version():
    async def test(core, policy):
        versions = []

        async def ask(number):
            chunk = await core.act(seen(number), number, "openpi")
            assert (chunk.actions == wanted(number, "push", offset=float(chunk.version))).all()
            versions.append(chunk.version)

        async def client(number):
            while core.version < 4:
                await ask(number)
                if number == 0:
                    weights = [("offset", policy.offset.detach() + 1)]
                    await asyncio.to_thread(core.engine.update_weights, weights, core.version + 1)
            await ask(number)

        await asyncio.gather(*(client(number) for number in range(8)))
        assert {0, 4} <= set(versions) <= {0, 1, 2, 3, 4}

    with_core(test)


def test_draining_answers_what_is_under_way_and_refuses_the_rest():
    async def test(core, policy):
        core.pause()
        tasks = [asyncio.create_task(core.act(seen(i), i, "openpi")) for i in range(3)]
        await asyncio.sleep(0)
        assert await core.drain()
        assert [(await task).actions[0, 0] for task in tasks] == [wanted(i, "push")[0, 0] for i in range(3)]
        with raises_code("server-stopping", ServingError):
            await core.act(seen(1), 1, "openpi")

    with_core(test)


def test_draining_ends_at_its_limit():
    async def test(core, policy):
        core._idle.clear()  # a request that is never answered
        assert not await core.drain()

    with_core(test, drain_timeout_s=0.01)


def test_what_is_no_exception_is_an_error_of_the_policy():
    async def test(core, policy):
        for error in (SystemExit(3), asyncio.CancelledError(), StopIteration()):
            policy.predict_action_batch = Mock(side_effect=error)
            with pytest.raises(RuntimeError, match=type(error).__name__):
                await core.act(seen(1), 1, "openpi")

    with_core(test)


def test_requests_of_a_batch_that_hangs_get_an_error_until_it_ends(caplog):
    async def test(core, policy):
        goes_on, real = threading.Event(), policy.predict_action_batch
        policy.predict_action_batch = lambda *a, **k: goes_on.wait(30) and real(*a, **k)
        watching = asyncio.create_task(core.watch(lambda: None))
        with raises_code("server-model-hangs", ServingError):
            await core.act(seen(1), 1, "openpi")
        assert "in wait" in caplog.text, "its stack"
        with raises_code("server-model-hangs", ServingError):
            await core.act(seen(1), 1, "openpi")
        goes_on.set()
        while core.stalled:
            await asyncio.sleep(0.001)
        assert (await core.act(seen(2), 1, "openpi")).actions.shape == (5, 7)
        watching.cancel()

    with_core(test, stall_timeout_s=0.01)


def test_a_batch_that_hangs_for_good_ends_the_server_and_closing_does_not_wait():
    async def test(core, policy):
        goes_on, given_up = threading.Event(), asyncio.Event()
        policy.predict_action_batch = lambda *a, **k: goes_on.wait(30)
        watching = asyncio.create_task(core.watch(given_up.set))
        with raises_code("server-model-hangs", ServingError):
            await core.act(seen(1), 1, "openpi")
        await given_up.wait()
        assert await core.drain() and core.is_computing
        core.close()
        assert core.is_computing
        goes_on.set()
        watching.cancel()

    with_core(test, stall_timeout_s=0.001)


def test_a_batch_that_computes_does_not_hang():
    watch = BatchWatch(0.01)
    with watch:
        watch.look()
        start, used = time.monotonic(), time.thread_time()
        while time.thread_time() == used or time.monotonic() - start < 0.05:
            pass
        seen_from = ThreadPoolExecutor(1)
        assert not seen_from.submit(watch.look).result()
        time.sleep(0.05)
        assert "no processor time" in seen_from.submit(watch.look).result()
    assert not watch.look()


def test_the_figures_count_requests_and_batches():
    async def test(core, policy):
        await asyncio.gather(*(core.act(seen(i), i, "openpi") for i in range(4)))
        lines = dict(line.rsplit(" ", 1) for line in core.figures().splitlines())
        assert lines["embodrl_serve_batched_requests_total"] == "4" and lines["embodrl_serve_batches_total"] == "1"
        assert lines['embodrl_serve_requests_total{protocol="openpi"}'] == "4"
        assert lines['embodrl_serve_request_seconds_bucket{le="+Inf"}'] == "4"
        assert lines["embodrl_serve_policy_version"] == "0"

    with_core(test)


@pytest.mark.parametrize("most", [1, 3])
def test_the_oldest_requests_come_first(most):
    async def test(core, policy):
        done = []

        async def ask(number):
            await core.act(seen(number), number, "openpi")
            done.append(number)

        await asyncio.gather(*(ask(number) for number in range(9)))
        assert done == sorted(done)

    with_core(test, max_batch_size=most)


def test_signals_within_a_second_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    server = PolicyServer(engine_of(MeanPolicy()), config_of("openpi"), None, print)
    server._second, abandoned = SecondSignal(lambda: now[0]), list[float]()
    monkeypatch.setattr(server.core, "abandon", lambda: abandoned.append(now[0]))
    for now[0] in (100.0, 100.0 + 0.9 * REPEAT_S, 100.0 + REPEAT_S):
        server.stop(signal.SIGTERM)
    assert abandoned == [100.0 + REPEAT_S] and server.signal == signal.SIGTERM
