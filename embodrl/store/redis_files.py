"""Files in Redis, behind fsspec's interface: ``redis://HOST:PORT/DB/PREFIX``, or rediss:// with TLS.

A file is a hash, whose fields 0, 1, ... are its parts of ``PART_BYTES`` (a value of Redis has at most 512 MB). A
directory is a set of the names in it, and its key ends with a slash; it exists while it has any. A file that
``pipe_file`` writes is replaced in one transaction; ``put_file`` sends part by part.

The server may be a node of a cluster. Transactions need all their keys on one node there: each begins with the prefix
as its hash tag, ``{PREFIX}/...``, so that a store is on one node and different stores are on different ones.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractFileSystem

from embodrl.errors import StoreError
from embodrl.store.urls import PASSWORD, REDIS, redis_place

PART_BYTES = 4 * 2**20
_TIMEOUT_S = 30.0
_IDLE_S = 30


@contextmanager
def _full() -> Iterator[None]:
    """Turn Redis's refusal of more data into the error of a full disk."""
    from redis.exceptions import OutOfMemoryError

    try:
        yield
    except OutOfMemoryError as error:
        raise OSError(errno.ENOSPC, f"{error} (Redis's maxmemory)") from error


class RedisFiles(AbstractFileSystem):
    """Files of one prefix in Redis; paths begin with the prefix. Errors are redis-py's, or OSError as for files.

    Args:
        url: see ``redis_place``; without a password it is that of ``REDISCLI_AUTH``, if set.

    Raises:
        StoreError: the URL has another form.
        ImportError: redis-py is not installed.
    """

    protocol = REDIS
    cachable = False

    def __init__(self, url: str) -> None:
        super().__init__()
        try:
            import redis  # noqa: F401
        except ImportError as error:
            raise ImportError("the package redis is not installed: pip install 'embodrl[redis]'") from error
        parts, self._database, self.prefix = redis_place(url)
        self._has_tls = parts.scheme == "rediss"
        self._settings: dict[str, Any] = {
            "host": parts.hostname,
            "port": parts.port or 6379,
            "username": parts.username,
            "password": parts.password or os.environ.get(PASSWORD),
            "socket_timeout": _TIMEOUT_S,
            "socket_connect_timeout": _TIMEOUT_S,
            "health_check_interval": _IDLE_S,
        }

    def _server(self, database: int) -> Any:
        """Return a client of the server; by a pool of its own, since redis-py's repeats what fails for seconds."""
        import redis

        kind = redis.SSLConnection if self._has_tls else redis.Connection
        return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=kind, db=database, **self._settings))

    @cached_property
    def _is_in_cluster(self) -> bool:
        """Whether the server belongs to a cluster; raises StoreError for another database than the first."""
        import redis

        try:
            self._server(database=0).execute_command("CLUSTER", "INFO")
        except redis.ResponseError:  # without a cluster, the command is refused or unknown
            return False
        if self._database:
            message = f"a cluster of Redis has only database 0, and store.url names {self._database}"
            raise StoreError(message, "write redis://HOST:PORT/0/PREFIX", code="store-url")
        return True

    @cached_property
    def _redis(self) -> Any:  # the types of redis-py are of decoded answers, too
        import redis

        if self._is_in_cluster:
            return redis.RedisCluster(ssl=self._has_tls, **self._settings)
        return self._server(self._database)

    def _key(self, path: str) -> str:
        """Return the key of a file, or of a directory, whose path ends with a slash."""
        return f"{{{self.prefix}}}{path.removeprefix(self.prefix)}" if self._is_in_cluster else path

    def _keys(self, path: str) -> tuple[str, str]:
        """Return the keys of a path as a file and as a directory."""
        return self._key(path), self._key(f"{path}/")

    def _link(self, pipeline: Any, path: str) -> None:
        """Add a path to its directory, and that to its own, up to the prefix."""
        while path != self.prefix:
            parent, _, name = path.rpartition("/")
            pipeline.sadd(self._key(f"{parent}/"), name)
            path = parent

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = path.rstrip("/")
        names: set[bytes] = self._redis.smembers(self._key(f"{path}/"))
        if not names:
            entry = self.info(path)  # raises FileNotFoundError
            return [entry if detail else path]
        paths = [f"{path}/{name.decode()}" for name in sorted(names)]
        return [self.info(one) for one in paths] if detail else paths

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = path.rstrip("/")
        key = self._key(path)
        if count := self._redis.hlen(key):
            size = (count - 1) * PART_BYTES + self._redis.hstrlen(key, str(count - 1))
            return {"name": path, "size": size, "type": "file"}
        if self._redis.exists(self._key(f"{path}/")):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def exists(self, path: str, **kwargs: Any) -> bool:
        path = path.rstrip("/")
        return bool(self._redis.exists(*self._keys(path)))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        if start or (end is not None and end < 0):
            raise NotImplementedError("the store reads files from their beginning")
        # One request in either case, so that a file is never half an old one and half a new one.
        if end is None:
            parts = self._redis.hgetall(self._key(path))
            content = b"".join(parts[key] for key in sorted(parts, key=int))
        else:
            found = self._redis.hmget(self._key(path), [str(number) for number in range(max(-(-end // PART_BYTES), 1))])
            parts = [part for part in found if part is not None]
            content = b"".join(parts)[:end]
        if not parts:
            raise FileNotFoundError(path)
        return content

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        chunks = [value[start : start + PART_BYTES] for start in range(0, max(len(value), 1), PART_BYTES)]
        with _full(), self._redis.pipeline(transaction=True) as pipeline:
            pipeline.unlink(self._key(path))
            pipeline.hset(self._key(path), mapping={str(number): chunk for number, chunk in enumerate(chunks)})
            self._link(pipeline, path)
            pipeline.execute()

    def put_file(self, lpath: str, rpath: str, callback: Any = None, mode: str = "overwrite", **kwargs: Any) -> None:
        with Path(lpath).open("rb") as file:
            self.pipe_file(rpath, file.read(PART_BYTES))
            number = 0
            while part := file.read(PART_BYTES):
                number += 1
                with _full():
                    self._redis.hset(self._key(rpath), str(number), part)

    def get_file(self, rpath: str, lpath: Any = None, callback: Any = None, outfile: Any = None, **kwargs: Any) -> None:
        with Path(lpath).open("wb") as file:
            number = 0
            while (part := self._redis.hget(self._key(rpath), str(number))) is not None:
                file.write(part)
                number += 1
        if not number:
            raise FileNotFoundError(rpath)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        path = path.rstrip("/")
        if not self.exists(path):
            self._redis.transaction(lambda pipeline: self._forget(pipeline, path), *self._keys(path))
            raise FileNotFoundError(path)
        names: set[bytes] = self._redis.smembers(self._key(f"{path}/"))
        if names and not recursive:
            raise IsADirectoryError(path)
        self._remove(path)

    def _forget(self, pipeline: Any, path: str) -> None:
        """Remove the name of a directory that has lost its last file, unless it has one again."""
        is_gone = not pipeline.exists(*self._keys(path))
        pipeline.multi()
        parent, _, name = path.rpartition("/")
        if is_gone:
            pipeline.srem(self._key(f"{parent}/"), name)

    def _remove(self, path: str) -> None:
        """Remove what is in a directory; then it, or a file, and its name in its own directory."""
        for name in self._redis.smembers(self._key(f"{path}/")):
            self._remove(f"{path}/{name.decode()}")
        parent, _, name = path.rpartition("/")
        with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.unlink(self._key(path))
            pipeline.srem(self._key(f"{parent}/"), name)
            pipeline.execute()
