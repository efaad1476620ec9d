"""The page on which a person corrects a policy, over HTTP."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse, RemoteDisconnected
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embodrl.data.replay import HUMAN, POLICY
from embodrl.envs.real_time.browser import MAX_KEYS, Browser
from embodrl.envs.real_time.controls import Controls
from embodrl.envs.real_time.devices import open_device
from embodrl.runs.intervention import Person

TIMEOUT_S = 30.0


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    device = open_device("browser", 7, str(tmp_path / "robot"))
    assert isinstance(device, Browser)
    # Keys are held until the test has read them, however long that takes.
    device._keyboard._now = lambda: 0.0
    yield device
    device.close()


def ask(browser: Browser, method: str, place: str, body: bytes | None = None, **headers: str) -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", browser.port, timeout=TIMEOUT_S)
    path = place if place.startswith("/") else browser.url.partition(str(browser.port))[2] + place
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    response.content = response.read()  # type: ignore[attr-defined]
    connection.close()
    return response


def content(response: Any) -> bytes:
    assert response.status == 200
    return response.content


def test_the_page_shows_the_camera_and_its_keys_act(browser: Browser, tmp_path: Path) -> None:
    person, actions = Person(browser), np.zeros((1, 7), np.float32)
    picture = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
    seen: Any = SimpleNamespace(images=picture[None, None])
    assert person.correct(seen, actions)[1].tolist() == [POLICY], "nobody has pressed a key"
    assert b"Enter ready" in content(ask(browser, "GET", ""))
    np.testing.assert_array_equal(
        np.asarray(Image.open(io.BytesIO(content(ask(browser, "GET", "picture?7"))))), picture
    )
    content(ask(browser, "POST", "keys", b"ds"))
    wanted, acted_by = person.correct(seen, actions)
    assert wanted[0].tolist() == [1, -1, 0, 0, 0, 0, 1] and acted_by.tolist() == [HUMAN]
    content(ask(browser, "POST", "keys", b" \xffy"))
    assert {path.name for path in (tmp_path / "robot").iterdir()} == {"stop", "success"}
    content(ask(browser, "POST", "keys", b"c"))
    assert not (tmp_path / "robot" / "stop").exists(), "released by another key"


def test_others_are_refused(browser: Browser) -> None:
    here = f"127.0.0.1:{browser.port}"
    for method, place, headers in (
        ("GET", "/", {}),
        ("GET", "/guess/", {}),
        ("POST", "/guess/keys", {}),
        ("GET", "keys", {}),
        ("GET", "../x", {}),
        ("GET", "", {"Host": "elsewhere.example"}),
        ("POST", "keys", {"Host": "elsewhere.example"}),
    ):
        assert ask(browser, method, place, b"d" if method == "POST" else None, **headers).status == 404, place
    assert ask(browser, "POST", "keys", b"d" * (MAX_KEYS + 1)).status == 413
    assert ask(browser, "POST", "keys", b"", **{"Content-Length": "-1", "Host": here}).status == 413
    assert browser.read() is None


def test_a_stop_that_is_lost_is_reported(
    browser: Browser, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(browser._keyboard._controls, "say", full)
    with pytest.raises(RemoteDisconnected):
        ask(browser, "POST", "keys", b" ")
    assert "No space left on device" in caplog.text and browser.url.split("/")[-2] not in caplog.text


def test_the_page_ends_with_the_device(tmp_path: Path) -> None:
    device = Browser(7, Controls(str(tmp_path)))
    device.close()
    with pytest.raises(ConnectionError), socket.create_connection(("127.0.0.1", device.port), TIMEOUT_S):
        pass
