"""A store in Redis: files in parts, directories, passwords, and a server that is full or away."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
from expect import raises_code
from redis_server import fake_redis, redis_cluster, redis_server

from embodrl.config import load_config
from embodrl.errors import ConfigError, StoreError
from embodrl.store import redis_files
from embodrl.store.store import Store

pytest.importorskip("redis")
PART = 10


@pytest.fixture(params=["fake", "server", "cluster"])
def url(request, tmp_path):
    servers = {"fake": fake_redis, "server": lambda: redis_server(tmp_path), "cluster": lambda: redis_cluster(tmp_path)}
    with servers[request.param]() as found:
        yield f"{found}/runs/one"


@pytest.fixture
def files(url, monkeypatch):
    monkeypatch.setattr(redis_files, "PART_BYTES", PART)
    return redis_files.RedisFiles(url)


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART])
def test_a_file_comes_back_and_its_parts_are_bounded(files, tmp_path, size):
    content, path = os.urandom(size), "runs/one/weights/v1/a.bin"
    (tmp_path / "a").write_bytes(content)
    files.put_file(str(tmp_path / "a"), path)
    files.get_file(path, str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == content == files.cat_file(path)
    assert files.info(path)["size"] == size and files.cat_file(path, end=PART + 1) == content[: PART + 1]
    assert all(len(part) <= PART for part in files._redis.hvals(files._key(path)))
    files.pipe_file(path, content[:1])  # a shorter one leaves nothing of the longer one
    assert files.cat_file(path) == content[:1]
    files.pipe_file(path, content)
    assert files.cat_file(path) == content


def test_directories_are_as_in_a_file_system(files):
    for path in ("a/one/x", "a/one/y/z", "a/two/x", "b"):
        files.pipe_file(f"runs/one/{path}", b"1")
    assert files.ls("runs/one/a", detail=False) == ["runs/one/a/one", "runs/one/a/two"]
    assert [entry["type"] for entry in files.ls("runs/one")] == ["directory", "file"]
    assert files.exists("runs/one/a/one/y") and not files.exists("runs/one/a/o") and not files.exists("runs/one/c")
    with pytest.raises(IsADirectoryError):
        files.rm("runs/one/a")
    files.rm("runs/one/a/one", recursive=True)
    assert files.ls("runs/one/a", detail=False) == ["runs/one/a/two"]
    files.rm("runs/one/a/two/x")
    for action in (files.ls, files.cat_file, files.info, files.rm):
        with pytest.raises(FileNotFoundError):
            action("runs/one/a/one")
    kept = {"runs/one/", "runs/one/a/", "runs/one/b"}
    assert {key.decode() for key in files._redis.scan_iter()} == {files._key(path) for path in kept}
    files.rm("runs/one", recursive=True)
    assert not list(files._redis.scan_iter())


def test_a_note_that_was_removed_is_not_listed(url):
    store = Store(url)
    store.create()
    store.put_note("leases/a", {"beats": 1})
    store.put_note("leases/b", {"beats": 1})
    assert store.names("leases") == ["leases/a", "leases/b"]
    store.remove("leases/a")
    store.remove("leases/c")
    assert store.names("leases") == ["leases/b"] and store.mark("leases/b") is not None


def test_two_prefixes_are_two_stores(url, tmp_path):
    first, second = Store(url), Store(url.replace("/one", "/two"))
    first.create()
    first.put_note("done/trainer", {"version": 1})
    with raises_code("store-missing"):
        second.check()
    second.create()
    assert second.mark("done/trainer") is None and second.names("done") == [] and first.names("done")


def test_a_store_is_on_one_node_of_a_cluster_and_found_from_each(tmp_path):
    with redis_cluster(tmp_path) as address:
        stores = [Store(f"{address}/{prefix}") for prefix in ("one", "two", "three", "four", "five", "six")]
        for store in stores:
            store.create()
            store.put_note("done/trainer", {})
        files = stores[0]._fs
        assert {files._redis.keyslot(key) for key in files._redis.scan_iter("{one}*")} == {files._redis.keyslot("one")}
        assert len({store._fs._redis.get_node_from_key(store._root).port for store in stores}) > 1
        for node in files._redis.get_nodes():
            assert Store(f"redis://{node.host}:{node.port}/0/one").names("done") == ["done/trainer"]
        with raises_code("store-url", StoreError, "database 0"):
            Store(f"{address.removesuffix('0')}3/one").create()


def test_a_cluster_that_is_away_is_not_an_empty_store(tmp_path):
    with redis_cluster(tmp_path) as address:
        store = Store(f"{address}/one")
        store.create()
    for action in (store.check, lambda: store.names("episodes"), lambda: store.put_note("a/b", {})):
        with raises_code("store-unreachable"):
            action()


def test_a_server_that_is_away_is_not_an_empty_store(tmp_path):
    with fake_redis() as address:
        store = Store(f"{address}/one")
        store.create()
    store._fs._redis.connection_pool.disconnect()
    for action in (store.check, lambda: store.names("episodes"), lambda: store.put_note("a/b", {})):
        with raises_code("store-unreachable"):
            action()


def test_a_full_server_is_a_full_store(tmp_path):
    with redis_server(tmp_path, "--maxmemory", "3mb") as address:
        store = Store(f"{address}/one")
        store.create()
        (tmp_path / "large").mkdir()
        (tmp_path / "large" / "a").write_bytes(os.urandom(4 * 2**20))
        with raises_code("store-full"):
            for number in range(4):
                store.put(tmp_path / "large", f"weights/v{number}")
        assert store.names("episodes") == []


def test_the_password_is_that_of_the_environment_and_nothing_shows_it(tmp_path, monkeypatch):
    with redis_server(tmp_path, "--requirepass", "hush") as address:
        with raises_code("store-unreachable"):
            Store(f"{address}/one").create()
        monkeypatch.setenv("REDISCLI_AUTH", "hush")
        store = Store(f"{address}/one")
        store.create()
        store.check()
        monkeypatch.delenv("REDISCLI_AUTH")
        written = address.replace("://", "://default:hush@")
        assert str(Store(f"{written}/one")) == f"{address.replace('://', '://default@')}/one"
        Store(f"{written}/one").check()
        with pytest.raises(StoreError) as caught:
            Store(f"{written.replace('hush', 'hush/wrong')}/one").create()
        assert "hush" not in str(caught.value)
        with pytest.raises(StoreError) as caught:
            Store(f"{written.replace('hush', 'hush-wrong')}/one").create()
        assert "hush" not in str(caught.value)


def test_a_password_in_the_settings_is_refused_and_not_repeated():
    with pytest.raises(ConfigError) as caught:
        load_config(["env=toy", "store.url=redis://me:hush@host:6379/0/one"])
    assert "REDISCLI_AUTH" in str(caught.value) and "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://h/0/a", "redis://h:1/15/a/b", "rediss://me@h:1/0/a@b", "redis://h:6379/0/a@b"]
)
def test_urls_of_redis(url):
    assert load_config(["env=toy", f"store.url={url}"]).config.store_url == url
    assert str(Store(url)) == url  # which connects to nothing yet


@pytest.mark.parametrize(
    "url", ["redis://h:1/0", "redis://h:1/a/b", "redis://h:x/0/a", "redis:///0/a", "redis://h/0/a?b"]
)
def test_what_names_no_place_in_redis_is_refused(url):
    with raises_code("store-url-is-valid", ConfigError):
        load_config(["env=toy", f"store.url={url}"])
    with raises_code("store-url"):
        Store(url)


@pytest.mark.parametrize(
    ("name", "url", "extra"),
    [("redis", "redis://h:1/0/a", "embodrl[redis]"), ("fsspec", "/data/store", "embodrl[store]")],
)
def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch, name, url, extra):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == name else find(asked))
    with raises_code("store-library-is-installed", ConfigError) as caught:
        load_config(["env=toy", f"store.url={url}"])
    assert extra in str(caught.value)


def test_opening_without_the_library_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with raises_code("store-url", StoreError) as caught:
        Store("redis://h:1/0/a")
    assert "embodrl[redis]" in str(caught.value)
