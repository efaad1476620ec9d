"""A server on this machine that speaks the hub's HTTP: repositories, revisions, files, and uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

LFS = (".safetensors", ".mp4", ".parquet")


@dataclass
class Repository:
    """Revisions -> commits -> files."""

    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: bool = False

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Replace the content of a branch or tag, and return the commit."""
        text = repr((sorted(files.items()), len(self.commits)))
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = files
        self.refs[ref] = sha
        return sha


class FakeHub(ThreadingHTTPServer):
    """The server.

    Attributes:
        models: and datasets, by ``OWNER/NAME``.
        requests: method and path of each.
        altered: path of a file -> content that is sent in its place.
        statuses: repository -> status of every answer about it.
        token: that uploads need.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: dict[str, Repository] = {}
        self.datasets: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.altered: dict[str, bytes] = {}
        self.statuses: dict[str, int] = {}
        self.token = "hf_secret"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def model(self, name: str, files: dict[str, bytes], ref: str = "main") -> str:
        """Add a commit to a model, and return it."""
        return self.models.setdefault(name, Repository()).commit(files, ref)

    def dataset(self, name: str, files: dict[str, bytes], ref: str = "main") -> str:
        """Add a commit to a dataset, and return it."""
        return self.datasets.setdefault(name, Repository()).commit(files, ref)


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[FakeHub]:
    """Serve, with huggingface_hub of this process directed there, and an empty cache below ``home``."""
    from huggingface_hub import constants

    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    from huggingface_hub import hf_api

    monkeypatch.setattr(hf_api.api, "endpoint", server.url)  # of functions of the module
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def git_sha1(content: bytes) -> str:
    """Return git's id of a blob."""
    return hashlib.sha1(b"blob " + str(len(content)).encode() + b"\0" + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._get(body=False)

    def do_GET(self) -> None:
        self._get(body=True)

    def _answer(self, status: int, content: object = None, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _find(self, parts: list[str], kinds: dict[str, dict[str, Repository]]) -> tuple[Repository | None, list[str]]:
        """Return the repository that a path begins with, after its status, and the rest of the path."""
        kind = parts[0] if parts[0] in kinds else "models"
        parts = parts[1:] if parts[0] in kinds else parts
        name = "/".join(parts[:2])
        if (status := self.server.statuses.get(name)) is not None:
            self._answer(status, {"error": "no"}, {"X-Error-Code": {401: "", 403: "GatedRepo"}.get(status, "")})
            return None, []
        repository = kinds[kind].get(name)
        if repository is None:
            self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        return repository, parts[2:]

    def _get(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(f"{self.command} {path}")
        parts = path.split("/")
        kinds = {"models": self.server.models, "datasets": self.server.datasets}
        if parts[0] == "api":
            repository, rest = self._find(parts[1:], kinds)
            if repository is not None:
                self._about(repository, rest)
            return
        repository, rest = self._find(parts, kinds)
        if repository is not None:
            self._file(repository, rest[1], "/".join(rest[2:]))

    def _commit(self, repository: Repository, revision: str) -> str | None:
        sha = repository.refs.get(revision, revision)
        if sha not in repository.commits:
            self._answer(404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"})
            return None
        return sha

    def _about(self, repository: Repository, rest: list[str]) -> None:
        sha = self._commit(repository, "/".join(rest[1:]) or "main")
        if sha is None:
            return
        files = repository.commits[sha]
        if rest[:1] == ["tree"]:
            self._answer(200, [_entry(path, content) for path, content in files.items()])
        else:
            siblings = [{"rfilename": path} for path in files]
            self._answer(200, {"id": "o/n", "sha": sha, "private": repository.private, "siblings": siblings})

    def _file(self, repository: Repository, revision: str, path: str) -> None:
        sha = self._commit(repository, revision)
        if sha is None:
            return
        content = repository.commits[sha].get(path)
        if content is None:
            self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        entry = _entry(path, content)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        content = self.server.altered.get(path, content)
        self.send_response(200)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha}
        headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))} if "lfs" in entry else {}
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._answer(401, {"error": "Invalid credentials"})
        elif path == "api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif path == "api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            self._answer(
                200, {"transfer": "basic", "objects": [self._place(each) for each in json.loads(body)["objects"]]}
            )
        elif "/preupload/" in path:
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(LFS) else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        else:
            self._commit_files("/".join(path.split("/")[2:4]), [json.loads(line) for line in body.splitlines()])

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if name in self.server.models:
            self._answer(409, {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"})
            return
        private = wanted.get("private") is True or wanted.get("visibility") == "private"
        self.server.models[name] = Repository(private=private)
        self.server.models[name].commit({})
        self._answer(200, {"url": f"{self.server.url}/{name}", "name": name, "id": "1"})

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.server.url}/upload/{wanted['oid']}"
        return wanted | {"actions": {"upload": {"href": href, "header": {}}}}

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.objects[hashlib.sha256(content).hexdigest()] = content
        self._answer(200, b"")

    def _commit_files(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = dict(self.server.models[name].commits[self.server.models[name].refs["main"]])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        sha = self.server.models[name].commit(files)
        self._answer(
            200, {"commitUrl": f"{self.server.url}/{name}/commit/{sha}", "commitOid": sha, "pullRequestUrl": None}
        )


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
    if path.endswith(LFS):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 130}
    return entry
