"""A store shared by several processes: directories that are complete or absent, at a path or any fsspec URL.

A directory consists of its files and, written last, the mark ``STABLE``: a JSON object with size and SHA-256 of each
file, and facts from its writer. Readers ignore a directory without the mark, and one with the mark never changes. The
store needs no locks, and no renames except for the mark in a local directory, since object stores lack both: each name
has one writer (see lease.py).
"""

from __future__ import annotations

import errno
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from embodrl.data.store_shards import SIGN, STABLE
from embodrl.errors import EmbodrlError, StoreError
from embodrl.fields import MAX_JSON_BYTES, Fields, parse_fields
from embodrl.names import without_password
from embodrl.storage.atomic import atomic_directory, sync_directory, sync_tree
from embodrl.storage.integrity import sha256_of
from embodrl.store.urls import REDIS, scheme_of

_LOOK_S = 0.2
OUTAGES = ("store-unreachable", "store-full")
"""Codes of possibly transient errors."""
_HINT = "see docs/store.md; earlier data is intact"


def _files(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it; raises StoreError, ValueError or ImportError."""
    import fsspec

    if scheme_of(url) in REDIS:
        from embodrl.store.redis_files import RedisFiles

        files = RedisFiles(url)
        return files, files.prefix
    return fsspec.core.url_to_fs(url)


class Store:
    """A place for directories with names such as ``episodes/NAME``.

    Every method raises StoreError if the store can't be reached.

    Args:
        url: absolute path, redis://HOST:PORT/DB/PREFIX, or an fsspec URL such as s3://BUCKET/PREFIX; credentials come
            from the default locations of the URL's library.

    Attributes:
        url: the URL without a password.

    Raises:
        StoreError: the URL is not supported, or its library is not installed.
    """

    def __init__(self, url: str) -> None:
        url = url.rstrip("/")
        self.url = without_password(url)
        try:
            self._fs, self._root = _files(url)
        except (ValueError, ImportError) as error:
            hint = "give a path or a URL such as s3://BUCKET/PREFIX, and install the library that the message names"
            raise StoreError(f"can't open a store at {self.url}: {error}", hint, code="store-url") from error
        self._marked: dict[str, set[str]] = {}
        self._is_local = "file" in ((p,) if isinstance(p := self._fs.protocol, str) else p)

    def __str__(self) -> str:
        return self.url

    def _path(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *parts))

    @contextmanager
    def _reported(self, what: str, hint: str = "retrying while the command runs; " + _HINT) -> Iterator[None]:
        """Turn any failure of the block into a StoreError."""
        try:
            yield
        except EmbodrlError:
            raise
        except Exception as error:  # every kind of store raises its own errors
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                message = f"{self.url} is full: {error.strerror}"
                raise StoreError(message, f"make room there; {hint}", code="store-full") from error
            problem = f"{type(error).__name__}: {str(error)[:300]}"
            raise StoreError(f"{what} {self.url} failed: {problem}", hint, code="store-unreachable") from error

    def create(self) -> None:
        """Create the store unless it exists."""
        hint = "check store.url, and where its library reads addresses and credentials; the same command resumes"
        with self._reported("opening", hint):
            if not self._fs.exists(self._path(SIGN)):
                self._fs.makedirs(self._root, exist_ok=True)
                self._fs.pipe_file(self._path(SIGN), b"episodes, weights and results; see docs/store.md of embodrl\n")

    def check(self) -> None:
        """Check that a store exists here; else raises StoreError."""
        with self._reported("looking into"):
            exists = self._fs.exists(self._path(SIGN))
        if not exists:
            hint = "check store.url; `embodrl store train` and `store collect` create a store"
            raise StoreError(f"there is no store at {self.url}", hint, code="store-missing")

    def _must_exist(self) -> None:
        """Check that the store exists, so that an unmounted directory is not taken for an empty store."""
        with self._reported("looking into"):
            self._fs.invalidate_cache()
            if not self._fs.exists(self._path(SIGN)):
                raise FileNotFoundError(f"{SIGN} is missing: it was removed, or is not mounted")

    def names(self, kind: str) -> list[str]:
        """Return the directories ``kind/NAME``, sorted by name; the newest may still lack a complete mark."""
        self._must_exist()
        with self._reported("listing"):
            try:
                paths = self._fs.ls(self._path(kind), detail=False)
            except FileNotFoundError:
                return []
            found = {f"{kind}/{PurePosixPath(path).name}" for path in paths}
            # A mark is checked until it is found, then cached: each check is a request to an object store.
            marked = found & self._marked.get(kind, set())
            marked |= {name for name in found - marked if self._fs.exists(self._path(name, STABLE))}
            self._marked[kind] = marked
            return sorted(marked)

    def mark(self, name: str) -> Fields | None:
        """Return the writer's facts about a directory, with ``files``; None if there is no such directory."""
        try:
            return self.note(name)
        except StoreError as error:
            if error.code != "store-unreadable":
                raise
            return None  # truncated, i.e. being written: the directory is not complete yet

    def note(self, name: str) -> Fields | None:
        """Return the content of the last ``put_note``; None if there is none.

        Raises:
            StoreError: the note is truncated, e.g. being written (``store-unreadable``).
        """
        path = self._path(name, STABLE)
        with self._reported("reading from"):
            try:
                content = self._fs.cat_file(path, end=MAX_JSON_BYTES)
            except FileNotFoundError:
                self._must_exist()
                return None
        try:
            return parse_fields(content, f"{self.url}/{name}/{STABLE}", StoreError, _HINT)
        except StoreError as error:
            text = f"what {self.url} says about {name} is truncated or damaged"
            raise StoreError(text, _HINT, code="store-unreadable") from error

    def put(self, directory: Path, name: str, facts: Mapping[str, object] | None = None) -> None:
        """Copy a directory into the store; a no-op if it is there already, so that a writer may retry.

        Args:
            directory: complete directory; a file ``STABLE`` and files whose names begin with a dot are left out.
            name: destination, with a single writer.
            facts: JSON that ``mark`` returns.

        Raises:
            StoreError: the directory can't be written, and does not exist for readers; or the name has other content.
        """
        paths = (p for p in directory.rglob("*") if p.is_file() and not p.name.startswith(".") and p.name != STABLE)
        named = {p.relative_to(directory).as_posix(): p for p in sorted(paths)}
        files = {key: {"num_bytes": p.stat().st_size, "sha256": sha256_of(p)} for key, p in named.items()}
        if (found := self.mark(name)) is not None:
            if found.fields("files").content == files:
                return
            hint = "two processes write into the same store under one name: give each its own name (store.collector)"
            raise StoreError(f"{self.url} holds another {name}", hint, code="store-name-taken")
        with self._reported("writing to"):
            for key, path in named.items():
                target = self._path(name, key)
                self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(path), target)
            if self._is_local:
                sync_tree(Path(self._path(name)))
        self.put_note(name, {**(facts or {}), "files": files})

    def put_note(self, name: str, content: Mapping[str, object]) -> None:
        """Write the mark of a directory, which may have no files; replaces an earlier one."""
        path = self._path(name, STABLE)
        self._must_exist()
        with self._reported("writing to"):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            # Object stores show an object complete or not at all; a local directory needs a rename for that.
            written = f"{path}.{secrets.token_hex(4)}" if self._is_local else path
            self._fs.pipe_file(written, json.dumps({"files": {}, **content}).encode())
            if self._is_local:
                sync_tree(Path(path).parent)
                Path(written).replace(path)
                sync_directory(Path(path).parent)

    def get(self, name: str, directory: Path) -> Fields:
        """Copy a directory of the store to this machine, where it appears complete; return its mark.

        Raises:
            StoreError: the directory is absent, removed meanwhile or damaged.
            OutputError: the copy can't be written.
        """
        try:
            return self._get(name, directory)
        except StoreError:
            if self.mark(name) is not None:
                raise
        raise StoreError(f"there is no {name} in {self.url}", "it may have been removed", code="store-missing")

    def _get(self, name: str, directory: Path) -> Fields:
        mark = self.mark(name)
        if mark is None:
            raise StoreError(f"there is no {name} in {self.url}", "it may have been removed", code="store-missing")
        files = mark.fields("files")
        with atomic_directory(directory) as staging:
            for key in files:
                if PurePosixPath(key).is_absolute() or ".." in PurePosixPath(key).parts:
                    files.refuse(f"{key!r} is not a file of this directory")
                target = staging / key
                target.parent.mkdir(parents=True, exist_ok=True)
                with self._reported("reading from"):
                    self._fs.get_file(self._path(name, key), str(target))
                entry = files.fields(key)
                facts = (entry.integer("num_bytes"), entry.text("sha256"))
                if (target.stat().st_size, sha256_of(target)) != facts:
                    raise StoreError(f"{key} of {name} in {self.url} is damaged", _HINT, code="store-damaged")
        return mark

    def remove(self, name: str) -> None:
        """Remove a directory, its mark first; a no-op if it is absent."""
        with self._reported("removing from"):
            for path in (self._path(name, STABLE), self._path(name)):
                with suppress(FileNotFoundError):
                    self._fs.rm(path, recursive=True)


def pause(seconds: float, should_stop: Callable[[], bool]) -> None:
    """Sleep for some seconds, or until ``should_stop`` returns True."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0 and not should_stop():
        time.sleep(min(_LOOK_S, left_s))


class Retry:
    """Runs store operations; reports an outage (``OUTAGES``) once instead of raising it.

    ``tell`` gets the message when an outage begins and when it ends.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._problem = ""

    def __call__(self, action: Callable[..., Any], *arguments: object, default: Any = None) -> Any:
        """Return the action's result; ``default`` if the store can't be reached now, or is full."""
        try:
            result = action(*arguments)
        except StoreError as error:
            if error.code not in OUTAGES:
                raise
            if not self._problem:
                self._tell(f"{error.message}; retrying")
            self._problem = error.message
            return default
        if self._problem:
            self._tell("the store is available again")
            self._problem = ""
        return result

    def insist(self, action: Callable[..., Any], *arguments: object, poll_s: float) -> Any:
        """Return the action's result, repeating it every ``poll_s`` seconds while the store is away or full."""
        away = object()
        while (result := self(action, *arguments, default=away)) is away:
            time.sleep(poll_s)
        return result
