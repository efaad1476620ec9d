"""A store: directories that are complete or absent, in a file system and in one without renames."""

import errno
import json
import uuid
from contextlib import nullcontext

import pytest
from expect import raises_code
from redis_server import fake_redis

from embodrl.config import load_config
from embodrl.errors import StoreError
from embodrl.store.parts import open_store
from embodrl.store.store import Retry, Store


@pytest.fixture(params=["path", "memory", "redis"])
def store(request, tmp_path):
    with fake_redis() if request.param == "redis" else nullcontext(f"memory://{uuid.uuid4().hex}") as url:
        store = Store(str(tmp_path / "store") if request.param == "path" else f"{url}/store")
        store.create()
        yield store


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "one"
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "b.bin").write_bytes(b"\0" * 100)
    (path / "a.txt").write_text("a")
    (path / ".hidden").write_text("left out")
    (path / "STABLE").write_text("that of somebody else")
    return path


def overwrite(store, name, content: bytes):
    store._fs.pipe_file(store._path(*name.split("/")), content)


def test_what_is_put_is_there_for_others(store, directory, tmp_path):
    assert store.names("episodes") == [] and store.mark("episodes/one") is None
    store.put(directory, "episodes/one", {"number": 3})
    store.put(directory, "episodes/one", {"number": 4})  # a second attempt changes nothing
    assert store.names("episodes") == ["episodes/one"] and store.names("weights") == []
    mark = Store(store.url).get("episodes/one", tmp_path / "copy")
    assert mark.integer("number") == 3
    found = {path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*.*")}
    assert found == {"a.txt", "inner/b.bin"}
    assert (tmp_path / "copy" / "inner" / "b.bin").read_bytes() == b"\0" * 100
    store.remove("episodes/one")
    store.remove("episodes/one")
    assert store.names("episodes") == []


def test_a_mark_that_was_seen_is_not_asked_for_again(store, directory, monkeypatch):
    for name in ("one", "two"):
        store.put(directory, f"episodes/{name}")
    store._fs.makedirs(store._path("episodes", "begun"))
    overwrite(store, "episodes/begun/a.txt", b"a")
    asked, exists = [], store._fs.exists
    monkeypatch.setattr(store._fs, "exists", lambda path: asked.append(path) or exists(path))
    for _ in range(3):
        assert store.names("episodes") == ["episodes/one", "episodes/two"]
    marks = [path.split("/")[-2] for path in asked if path.endswith("STABLE")]
    assert sorted(marks) == ["begun", "begun", "begun", "one", "two"]
    store.remove("episodes/one")
    assert store.names("episodes") == ["episodes/two"]
    store.put(directory, "episodes/one")
    assert store.names("episodes") == ["episodes/one", "episodes/two"]


def test_a_name_has_one_writer(store, directory):
    store.put(directory, "episodes/one")
    (directory / "a.txt").write_text("b")
    with pytest.raises(StoreError) as raised:
        store.put(directory, "episodes/one")
    assert raised.value.code == "store-name-taken"


@pytest.mark.parametrize("left", [None, b"", b'{"files": {"a.t'])
def test_what_was_interrupted_does_not_exist_and_is_repaired(store, directory, left, tmp_path):
    store.put(directory, "episodes/one")
    whole = store._fs.cat_file(store._path("episodes", "one", "STABLE"))
    store._fs.rm(store._path("episodes", "one", "STABLE"))
    if left is not None:
        overwrite(store, "episodes/one/STABLE", left)
    assert store.mark("episodes/one") is None
    with pytest.raises(StoreError) as raised:
        store.get("episodes/one", tmp_path / "copy")
    assert raised.value.code == "store-missing" and not (tmp_path / "copy").exists()
    store.put(directory, "episodes/one")
    assert store._fs.cat_file(store._path("episodes", "one", "STABLE")) == whole


@pytest.mark.parametrize("content", [b"\0" * 99, b"\1" * 100])
def test_damage_is_noticed_and_nothing_is_kept(store, directory, content, tmp_path):
    store.put(directory, "episodes/one")
    overwrite(store, "episodes/one/inner/b.bin", content)
    with pytest.raises(StoreError) as raised:
        store.get("episodes/one", tmp_path / "copy")
    assert raised.value.code == "store-damaged" and not (tmp_path / "copy").exists()


@pytest.mark.parametrize("name", ["../outside", "/outside", "inner/../../outside"])
def test_a_mark_can_not_lead_elsewhere(store, directory, name, tmp_path):
    store.put(directory, "episodes/one")
    facts = {"num_bytes": 1, "sha256": "0"}
    overwrite(store, "episodes/one/STABLE", json.dumps({"files": {name: facts}}).encode())
    with pytest.raises(StoreError):
        store.get("episodes/one", tmp_path / "copy")
    assert not (tmp_path / "outside").exists() and not (tmp_path / "copy").exists()


def test_notes_are_replaced(store):
    store.put_note("done/trainer", {"version": 1})
    store.put_note("done/trainer", {"version": 2})
    mark = store.mark("done/trainer")
    assert mark is not None and mark.integer("version") == 2


def test_an_unknown_kind_of_url_is_named():
    with pytest.raises(StoreError) as raised:
        Store("sftpp://host/path")
    assert raised.value.code == "store-url"


def test_an_outage_is_reported_once_and_its_end(tmp_path, monkeypatch):
    told: list[str] = []
    store, retry = Store(str(tmp_path)), Retry(told.append)
    store.create()
    with monkeypatch.context() as patch:
        patch.setattr(store._fs, "ls", lambda path, detail: 1 / 0)
        assert [retry(store.names, "episodes", default="away") for _ in range(3)] == ["away"] * 3
    assert retry(store.names, "episodes") == [] and len(told) == 2
    with pytest.raises(StoreError):  # what does not pass by itself is raised
        retry(store.get, "episodes/none", tmp_path / "copy")


def test_what_a_start_needs_is_repeated_until_it_is_done():
    lines, left = [], [StoreError("away", code="store-unreachable"), StoreError("full", code="store-full"), None, 3]

    def answer():
        if isinstance(one := left.pop(0), StoreError):
            raise one
        return one

    retry = Retry(lines.append)
    assert retry.insist(answer, poll_s=0.0) is None and len(left) == 1, "None is a result"
    assert lines == ["away; retrying", "the store is available again"]
    left.insert(0, StoreError("taken", code="store-name-taken"))
    with raises_code("store-name-taken"):
        retry.insist(answer, poll_s=0.0)


def test_a_full_store_is_named_and_takes_the_rest_later(store, directory, monkeypatch, tmp_path):
    told: list[str] = []
    retry = Retry(told.append)

    def put_half(source, target):
        store._fs.pipe_file(target, b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store._fs, "put_file", put_half)
        for _ in range(2):
            assert retry(store.put, directory, "episodes/one", default="later") == "later"
        assert store.names("episodes") == [] and len(told) == 1 and "is full" in told[0]
        with pytest.raises(StoreError) as raised:
            store.put(directory, "episodes/one")
        assert raised.value.code == "store-full"
    retry(store.put, directory, "episodes/one")
    assert store.get("episodes/one", tmp_path / "copy").fields("files").content.keys() == {"a.txt", "inner/b.bin"}


def test_a_store_that_is_away_is_not_an_empty_one(tmp_path, directory):
    store = Store(str(tmp_path / "store"))
    store.create()
    store.put(directory, "episodes/one")
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").mkdir()  # the place where it is mounted
    for action in (lambda: store.names("episodes"), lambda: store.mark("x/y"), lambda: store.put(directory, "x/y")):
        with pytest.raises(StoreError) as raised:
            action()
        assert raised.value.code == "store-unreachable"
    assert not list((tmp_path / "store").iterdir())
    (tmp_path / "store").rmdir()
    (tmp_path / "away").rename(tmp_path / "store")
    assert store.names("episodes") == ["episodes/one"]


def test_what_is_no_store_is_not_taken_for_an_empty_one(tmp_path):
    place = tmp_path / "missing"
    with raises_code("store-missing"):
        open_store(load_config([f"store.url={place}"]).config, create=False)
    assert not place.exists()


def test_a_mark_in_a_directory_is_replaced_as_a_whole(tmp_path, monkeypatch):
    store = Store(str(tmp_path))
    store.create()
    store.put_note("leases/desk", {"beats": 1})
    write, seen = store._fs.pipe_file, []

    def in_two_parts(path, content):
        write(path, content[:5])
        seen.append(Store(store.url).note("leases/desk").integer("beats"))
        write(path, content)

    monkeypatch.setattr(store._fs, "pipe_file", in_two_parts)
    store.put_note("leases/desk", {"beats": 2})
    assert seen == [1] and store.note("leases/desk").integer("beats") == 2
    assert [path.name for path in (tmp_path / "leases" / "desk").iterdir()] == ["STABLE"]
