"""embodrl/hub.py against a server on this machine that speaks the hub's HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, serving
from huggingface_hub import constants

from embodrl import hub
from embodrl.errors import HubError
from embodrl.hub import HubName, cached, fetch, parse, parse_dataset

MODEL = {
    "config.json": b'{"a": 1}',
    "model.safetensors": bytes(range(256)) * 4096,
    "modeling.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "checkpoints/step_1/model.safetensors": b"older",
}
PATTERNS = ("*.json", "*.safetensors")
DOWN = "http://127.0.0.1:9"
NAME = HubName("org/name")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with serving(monkeypatch, tmp_path / "home") as running:
        yield running


def code_of(name: HubName, to: Path | None = None) -> str:
    with pytest.raises(HubError) as caught:
        fetch(name, PATTERNS, to)
    assert caught.value.hint
    return caught.value.code


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("openvla/openvla-7b", HubName("openvla/openvla-7b")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("hf://org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("hf://datasets/lerobot/pusht@v3.0", HubName("lerobot/pusht", "v3.0", "dataset")),
        ("org/name@../../x", None),
        ("org/../name", None),
        ("a/b/c", None),
        ("/abs/path", None),
        ("name", None),
        ("./data/push", None),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    assert parse(text) == name
    if name is not None:
        assert parse(str(name)) == name


def test_a_path_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_dataset("data/push") is None  # a mistyped path asks no network
    (tmp_path / "outputs").mkdir()
    assert parse("outputs/my-policy") is None
    assert parse("hf://outputs/my-policy") == HubName("outputs/my-policy")


def test_what_is_fetched(server: FakeHub) -> None:
    commit = server.model("org/name", MODEL)
    assert cached(NAME, PATTERNS) is None
    found = fetch(NAME, PATTERNS)
    assert found.name == commit
    assert {path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()} == {
        "config.json",
        "model.safetensors",
    }  # no code, no pickle, no weights besides the model's own
    assert (found / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert cached(NAME, PATTERNS) == found
    server.requests.clear()
    assert fetch(HubName("org/name", commit), PATTERNS) == found
    assert not server.requests  # a commit is what it was


def test_facts_come_before_the_weights(server: FakeHub) -> None:
    server.model("org/name", MODEL)
    found = fetch(NAME, ("*.json",))
    assert not (found / "model.safetensors").exists()
    assert cached(NAME, ("*.json",)) == found
    assert cached(NAME, PATTERNS) is None
    assert fetch(NAME, PATTERNS) == found
    assert cached(NAME, PATTERNS) == found


def test_revisions(server: FakeHub) -> None:
    older = server.model("org/name", MODEL, "v1")
    newer = server.model("org/name", MODEL | {"config.json": b"{}"})
    assert fetch(HubName("org/name", "v1"), PATTERNS).name == older
    assert fetch(NAME, PATTERNS).name == newer
    assert code_of(HubName("org/name", "v2")) == "hub-missing"


@pytest.mark.parametrize("in_directory", [False, True])
@pytest.mark.parametrize("path", ["config.json", "model.safetensors"])
def test_a_file_that_differs_from_its_checksum_is_removed(
    server: FakeHub, tmp_path: Path, path: str, in_directory: bool
) -> None:
    server.model("org/name", MODEL)
    server.altered[path] = MODEL[path][:-1] + b"!"  # of the same size
    to = tmp_path / "here" if in_directory else None
    assert code_of(NAME, to) == "hub-checksum"
    assert cached(NAME, PATTERNS) is None
    server.altered.clear()
    assert (fetch(NAME, PATTERNS, to) / path).read_bytes() == MODEL[path]


def test_what_a_killed_fetch_has_not_compared_is_compared_by_the_next(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.model("org/name", MODEL)
    server.altered["config.json"] = b'{"a": 2}'

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(hub, "_verify", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch(NAME, PATTERNS)
    assert cached(NAME, PATTERNS) is None
    assert code_of(NAME) == "hub-checksum"


def test_a_damaged_cache_is_found_on_request(server: FakeHub) -> None:
    server.model("org/name", MODEL)
    blob = Path(os.path.realpath(fetch(NAME, PATTERNS) / "config.json"))
    blob.write_bytes(b'{"a": 3}')
    assert fetch(NAME, PATTERNS)
    with pytest.raises(HubError) as caught:
        fetch(NAME, PATTERNS, verify_all=True)
    assert caught.value.code == "hub-checksum"


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, "hub-token"), (403, "hub-access"), (404, "hub-missing"), (503, "hub-unreachable")],
)
def test_what_the_hub_refuses(server: FakeHub, status: int, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.model("org/name", MODEL)
    server.statuses["org/name"] = status
    with pytest.raises(HubError) as caught:
        fetch(NAME, PATTERNS)
    assert caught.value.code == code
    assert "hf_secret" not in str(caught.value)


def test_no_such_repository(server: FakeHub) -> None:
    assert code_of(HubName("org/nothing")) in ("hub-missing", "hub-access")
    server.model("org/empty", {"README.md": b"nothing here"})
    assert code_of(HubName("org/empty")) == "hub-missing"


def test_without_a_network(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.model("org/name", MODEL)
    found = fetch(NAME, PATTERNS)
    for name, value in (("ENDPOINT", DOWN), ("HUGGINGFACE_CO_URL_TEMPLATE", f"{DOWN}/x")):
        monkeypatch.setattr(constants, name, value)
    assert fetch(NAME, PATTERNS) == found  # of the cache
    assert code_of(HubName("org/other")) == "hub-unreachable"


def test_offline(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.model("org/name", MODEL)
    facts = fetch(NAME, ("*.json",))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.requests.clear()
    assert fetch(NAME, ("*.json",)) == facts
    assert code_of(NAME) == code_of(HubName("org/other")) == "hub-offline"
    assert not server.requests


def test_offline_with_a_cache_that_lists_no_files(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of huggingface_hub keep no list."""
    server.model("org/name", MODEL)
    found = fetch(NAME, PATTERNS)
    for path in (found.parents[1] / "trees").iterdir():
        path.unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(NAME, PATTERNS) == found


def test_content_that_is_not_fetched(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.model("org/leaves", {"../../config.json": b"{}"})
    assert code_of(HubName("org/leaves")) == "hub-content"
    server.model("org/large", {"config.json": b"{" + b" " * 2000 + b"}"})
    monkeypatch.setattr(hub, "MAX_OTHER_BYTES", 1000)
    assert code_of(HubName("org/large")) == "hub-content"
    server.model("org/many", {f"{number}.json": b"" for number in range(12)})
    monkeypatch.setattr(hub, "MAX_ENTRIES", 10)
    assert code_of(HubName("org/many")) == "hub-content"


def test_a_full_disk_is_found_before_the_download(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.model("org/name", MODEL)
    monkeypatch.setattr(hub, "DISK_RESERVE_BYTES", 2**62)
    assert code_of(NAME) == "hub-disk"
    assert not [line for line in server.requests if "resolve" in line]


def test_into_a_directory(server: FakeHub, tmp_path: Path) -> None:
    server.model("org/name", MODEL)
    to = tmp_path / "here"
    assert fetch(NAME, PATTERNS, to) == to
    assert (to / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert not (to / "model.safetensors").is_symlink()
