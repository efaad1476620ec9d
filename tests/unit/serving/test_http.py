"""embodrl's own HTTP API."""

import asyncio
import json
import re
from pathlib import Path

import numpy as np
import pytest
from served import MeanPolicy, raw, wanted
from served_http import array, picture, talk

from embodrl.config import load_config
from embodrl.config.policy_card import reads_state, trained_state_dim
from embodrl.hybrid_engines.weight_sync.disk import DiskSender
from embodrl.serving import listener
from embodrl.serving.wire.codec import unpack
from embodrl.trainer.files import export_policy


def test_own_api_acts_in_json_and_msgpack():
    async def test(server, session, post):
        seen = {"images": {"base_camera": picture(9)}, "instruction": "push"}
        status, found, headers = await post("/act", {"observation": seen})
        assert status == 200 and (array(found["actions"]) == wanted(9, "push")).all()
        assert found["timing"]["batch_size"] == 1 and headers["X-Policy-Version"] == "0"
        image = {b"__ndarray__": True, b"data": bytes([9]) * 12, b"dtype": "|u1", b"shape": [2, 2, 3]}
        body = raw({"observation": {"images.base_camera": image, "instruction": "push"}})
        status, found, _ = await post("/act", body, headers={"Content-Type": "application/msgpack"})
        assert unpack(found, lambda content: content)["actions"][b"data"] == wanted(9, "push").tobytes()
        for name, step in (("a", 0), ("a", 1), ("b", 0), ("a", 2)):
            _, found, _ = await post("/act", {"observation": seen, "session": name})
            assert (array(found["actions"]) == wanted(9, "push")[step : step + 1]).all()
        assert (await post("/reset", {"session": "a"}))[0] == 200
        _, found, _ = await post("/act", {"observation": seen, "session": "a"})
        assert (array(found["actions"]) == wanted(9, "push")[:1]).all()
        for wrong in ({"observation": seen, "session": ""}, {"observation": seen, "session": 3}, {"observation": 3}):
            assert (await post("/act", wrong))[0] == 422

    talk("http", test)


def test_own_api_tells_of_itself():
    async def test(server, session, post):
        async with session.get("/info") as answer:
            info = await answer.json()
        assert (info["model"], info["num_action_chunks"], info["action_dim"]) == ("openvla", 5, 7)
        assert info["keys"] == {"images": ["images.base_camera"], "state": ["state"], "instruction": "instruction"}
        async with session.get("/openapi.json") as answer:
            paths = (await answer.json())["paths"]
        routes = {route.resource.canonical for route in server.server.listeners[0]._runner.app.router.routes()}
        assert set(paths) == routes - {"/healthz", "/openapi.json"}
        refs = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(paths)))
        assert refs == {"Array", "Error"}

    talk("http", test)


def test_weights_are_taken_from_a_directory_marked_stable(tmp_path):
    async def test(server, session, post):
        seen = {"observation": {"images": {"base_camera": picture(9)}, "instruction": "push"}}
        for wrong in (
            {},
            {"directory": "relative"},
            {"directory": str(tmp_path / "none")},
            {"directory": str(tmp_path)},
        ):
            status, found, _ = await post("/weights", wrong)
            assert status == 422 and "server-weights" in found["error"]
        weights = {name: tensor.clone() for name, tensor in server.policy.named_parameters()}
        weights["offset"] += 3
        DiskSender(tmp_path).send(weights.items(), 12)
        status, found, headers = await post("/weights", {"directory": str(tmp_path / "v000012")})
        assert status == 200 and found["policy_version"] == 12 and headers["X-Policy-Version"] == "12"
        _, found, _ = await post("/act", seen)
        assert (array(found["actions"]) == wanted(9, "push", offset=3)).all() and found["policy_version"] == 12
        DiskSender(tmp_path).send([("another", weights["offset"])], 13)
        status, found, _ = await post("/weights", {"directory": str(tmp_path)})
        assert status == 422 and "weight-layout" in found["error"] and server.core.version == 12

    talk("http", test)


def test_pause_and_resume():
    async def test(server, session, post):
        assert (await post("/pause", {}))[1]["paused"] is True
        asked = asyncio.create_task(post("/act", {"images.base_camera": picture(9), "instruction": "push"}))
        while not len(server.core._under_way):
            await asyncio.sleep(0.001)
        assert not server.policy.batches
        assert (await post("/resume", {}))[1]["paused"] is False
        assert (await asked)[0] == 200

    talk("http", test)


def test_own_api_blames_the_client_for_what_it_did(tmp_path, monkeypatch, caplog):
    async def test(server, session, post):
        status, found, _ = await post("/act", b"x" * (2**20 + 1))
        assert status == 413 and "wire-too-large" in found["error"]
        status, found, _ = await post("/act", {"images.base_camera": picture(9), "instruction": "\ud800"})
        assert status == 422 and "wire-observation" in found["error"]
        status, found, _ = await post("/weights", {"directory": str(tmp_path / ("v" * 300))})
        assert status == 422 and "server-weights" in found["error"]

        def refuse(self):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(type(tmp_path), "iterdir", refuse)  # root may read everything
        status, found, _ = await post("/weights", {"directory": str(tmp_path)})
        assert status == 422 and "weights-unreadable" in found["error"]
        async with session.get("/info", headers={"Authorization": "Bearer \udcff"}) as answer:
            assert answer.status == 401

    talk("http", test, max_message_mb=1)
    assert not caplog.records


def test_the_example_of_the_page_gets_actions():
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    (body,) = re.findall(r"^curl .*/act \\\n +-d '(.*)'$", page, re.MULTILINE)

    async def test(server, session, post):
        status, found, _ = await post("/act", body)
        assert status == 200 and array(found["actions"]).shape == (5, 7)
        mean = np.mean(json.loads(body)["images"]["base_camera"])
        np.testing.assert_allclose(array(found["actions"]), wanted(mean, "push the cube"), rtol=1e-6)

    talk("http", test)


@pytest.mark.parametrize(
    "lists", [[[[256, 0, 0]]], [[[1, 2]]], [[[1, 2, 3], [1]]], [[[None, 1, 2]]], [], "a", {"a": 1}]
)
def test_lists_that_are_no_picture_are_refused(lists):
    async def test(server, session, post):
        status, found, _ = await post("/act", {"images.base_camera": lists, "instruction": "push"})
        assert status == 422 and "wire-observation" in found["error"]

    talk("http", test)


def test_a_checkpoint_says_itself_what_state_it_was_trained_on(monkeypatch):
    monkeypatch.setattr(listener, "trained_state_dim", lambda config: 9)  # the card of what the run began with
    monkeypatch.setattr(listener, "reads_state", lambda config: True)
    monkeypatch.setattr(MeanPolicy, "seen_state_dim", 4)

    async def test(server, session, post):
        seen = {"images": {"base_camera": picture(9)}, "instruction": "push"}
        for count, status in ((4, 200), (9, 422)):
            assert (await post("/act", {"observation": seen | {"state": [0.0] * count}}))[0] == status

    talk("http", test)


@pytest.mark.parametrize(("trained", "refused"), [(4, [0, 1, 3, 5]), (None, [0]), (0, [])])
def test_no_action_follows_from_a_state_that_was_not_sent(trained, refused, monkeypatch):
    """Every protocol asks ``ModelCore.act``."""
    monkeypatch.setattr(listener, "trained_state_dim", lambda config: trained)
    monkeypatch.setattr(listener, "reads_state", lambda config: True)

    async def test(server, session, post):
        seen = {"images": {"base_camera": picture(9)}, "instruction": "push"}
        for name in ("state", "states"):
            for count in (0, 1, 3, 4, 5):
                status, found, _ = await post("/act", {"observation": seen | {name: [0.0] * count}})
                sent = count if name == "state" else 0
                assert status == (422 if sent in refused else 200)
                assert ("wire-state" in json.dumps(found)) == (sent in refused)
        assert (await post("/act", {"observation": seen}))[0] == (422 if 0 in refused else 200)

    talk("http", test)


def test_zeros_for_a_state_have_to_be_wanted(monkeypatch):
    monkeypatch.setattr(listener, "trained_state_dim", lambda config: 4)
    monkeypatch.setattr(listener, "reads_state", lambda config: True)

    async def test(server, session, post):
        seen = {"images": {"base_camera": picture(9)}, "instruction": "push"}
        assert (await post("/act", {"observation": seen}))[0] == 200

    talk("http", test, pad_state=True)


@pytest.mark.parametrize(
    ("settings", "reads"),
    [
        (["model=mlp"], True),
        (["model=cnn", "env.include_state=false"], False),
        (["model=openvla", "env.include_state=true"], False),
    ],
)
def test_whether_a_policy_reads_a_state(settings, reads):
    assert reads_state(load_config(["env=toy", "model.random_weights=true", *settings], verb="serve").config) is reads


def test_a_policy_tells_how_many_numbers_of_state_it_was_trained_on(tmp_path):
    policy = MeanPolicy()
    policy.save_pretrained = lambda directory: directory.mkdir()
    policy.seen_state_dim = 4
    config = load_config(["env=toy"]).config
    export_policy(policy, tmp_path / "policy", config)
    model = config.model.model_copy(update={"warm_start": str(tmp_path / "policy")})
    assert trained_state_dim(config.model_copy(update={"model": model})) == 4
