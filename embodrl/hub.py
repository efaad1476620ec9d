"""Checkpoints and datasets on the Hugging Face hub: names, cache lookup and fetching.

Everything goes through huggingface_hub: its cache, its login, and HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from embodrl.errors import HubError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

MODEL_FACTS = ("*.json",)
"""Model files that the configuration rules read, and little more."""
_OFT_COMPONENTS = ("proprio_projector", "action_head", "vision_backbone", "noisy_action_projector")
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer*", "merges.txt", "chat_template.jinja"),
    *(f"{name}--*.pt" for name in _OFT_COMPONENTS),
)
"""Model files: weights, settings, tokenizer, and OpenVLA-OFT's separate components, which are read as plain tensors."""
DATASET_FACTS = ("meta/*", "index.json")
DATASET_FILES = (*DATASET_FACTS, "checksums.json", "*.parquet", "videos/*.mp4", "*.safetensors")
WEIGHTS = (".safetensors", ".parquet", ".mp4", ".pt")
"""Files that may be large."""
MAX_OTHER_BYTES = 2**28
MAX_ENTRIES = 500_000
DISK_RESERVE_BYTES = 2**30
_NAME = re.compile(
    r"(?:hf://(?P<dataset>datasets/)?)?(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w.-]+(?:/[\w.-]+)*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOCAL_RECORDS = ".cache/huggingface"
_LATER = "check the network and HF_ENDPOINT, and run the command again: complete files are kept"
_OFFLINE = "unset it, or fetch with network access (`embodrl fetch`) and copy the cache (HF_HOME) or the directory"


@dataclass(frozen=True)
class HubName:
    """A repository name.

    Attributes:
        repository: ``OWNER/NAME``.
        revision: branch, tag or commit; None for the main branch.
        kind: kind of content.
    """

    repository: str
    revision: str | None = None
    kind: Literal["model", "dataset"] = "model"

    def __str__(self) -> str:
        prefix = "hf://datasets/" if self.kind == "dataset" else ""
        return f"{prefix}{self.repository}{f'@{self.revision}' if self.revision else ''}"

    @property
    def is_dataset(self) -> bool:
        """Whether the repository holds demonstrations rather than a model."""
        return self.kind == "dataset"

    @property
    def is_commit(self) -> bool:
        """Whether the revision is immutable."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


def parse(text: str) -> HubName | None:
    """Return the repository that a text names: ``OWNER/NAME[@REVISION]``, ``hf://OWNER/NAME`` or ``hf://datasets/...``.

    None for any other text, and for a local path, whose first part is a directory.
    """
    match = _NAME.fullmatch(text)
    if match is None or ".." in text:
        return None
    if not text.startswith("hf://") and Path(text.partition("/")[0]).is_dir():
        return None
    return HubName(match["repository"], match["revision"], "dataset" if match["dataset"] else "model")


def is_hub_id(text: str) -> bool:
    """Return whether a text names a hub repository, rather than a path whose directory exists."""
    return parse(text) is not None and not Path(text).expanduser().parent.is_dir()


def parse_dataset(text: str) -> HubName | None:
    """Return a repository like ``parse``, but only for ``hf://datasets/OWNER/NAME[@REVISION]``: data/push is always a
    path.
    """
    name = parse(text)
    return name if name is not None and name.kind == "dataset" else None


def cached(name: HubName, patterns: Sequence[str]) -> Path | None:
    """Return the directory of a repository in the hub's cache; None unless all of its files are there.

    Offline, a cache that another tool filled without a file list counts as complete.
    """
    from huggingface_hub import constants, get_cached_repo_tree, resolve_revision
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, HFValidationError, RevisionResolutionError

    try:
        found = resolve_revision(
            name.repository, repo_type=name.kind, revision=name.revision, local_files_only=True
        ).resolved
    except (RevisionResolutionError, HFValidationError, OSError):
        return None
    place = _snapshot(replace(name, revision=found))
    try:
        tree = get_cached_repo_tree(name.repository, repo_type=name.kind, revision=found)
    except CachedRepoTreeNotFoundError:
        return place if constants.HF_HUB_OFFLINE and place.is_dir() else None
    files = _wanted(tree, name, patterns)
    complete = files and all((place / file.path).is_file() for file in files) and not _unverified(place).exists()
    return place if complete else None


def fetch(name: HubName, patterns: Sequence[str], to: Path | None = None, verify_all: bool = False) -> Path:
    """Return the directory of a repository's files, after fetching the missing ones.

    Fetched files are compared with the hub's checksums: SHA-256, or git's SHA-1 for small files. A file that differs is
    removed. An interrupted download is resumed; complete files are not fetched again.

    Args:
        name: repository to fetch.
        patterns: file patterns; nothing else is fetched.
        to: target directory; None for the hub's cache.
        verify_all: also compare files that were already in the cache.

    Raises:
        HubError: no network, offline with HF_HUB_OFFLINE, no such repository or revision, no permission, a file with a
            wrong checksum, a name that leaves the directory, or not enough disk space.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.hf_api import RepoFile

    if to is None and name.is_commit and not verify_all and (found := cached(name, patterns)) is not None:
        return found
    with explained(name):
        api = HfApi(library_name="embodrl")
        commit = api.resolve_revision(name.repository, repo_type=name.kind, revision=name.revision).resolved
        pinned = replace(name, revision=commit)
        if to is None and not verify_all and (found := cached(pinned, patterns)) is not None:
            return found
        entries = api.list_repo_tree(name.repository, recursive=True, revision=commit, repo_type=name.kind)
        listed = [entry for entry in itertools.islice(entries, MAX_ENTRIES + 1) if isinstance(entry, RepoFile)]
        files = _wanted(listed, name, patterns)
        place = to or _snapshot(pinned)
        missing = [file for file in files if not (place / file.path).is_file()]
        _check(name, files, sum(file.size for file in missing), place)
        marker = _unverified(place)
        names = {file.path for file in (files if verify_all or to is not None else missing)}
        names |= set(marker.read_text().splitlines()) if marker.is_file() else set()
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text("\n".join(sorted(names)))
        snapshot_download(
            name.repository,
            repo_type=name.kind,
            revision=commit,
            allow_patterns=list(patterns),
            ignore_patterns=list(_ignored(name)),
            local_dir=to,
        )
        for file in files:
            if file.path in names:
                _verify(name, file, place / file.path)
        marker.unlink(missing_ok=True)
        return place


def _ignored(name: HubName) -> tuple[str, ...]:
    """Return patterns that are never fetched: pickles, code, and other weights than the model's."""
    return ("*.bin", "*.pkl", "*.pickle", "*.py", *(("*/*.safetensors",) if name.kind == "model" else ()))


def _wanted(files: Sequence[RepoFile], name: HubName, patterns: Sequence[str]) -> list[RepoFile]:
    from huggingface_hub.utils import filter_repo_objects

    chosen = filter_repo_objects(
        files, allow_patterns=list(patterns), ignore_patterns=list(_ignored(name)), key=lambda file: file.path
    )
    return list(chosen)


def _snapshot(name: HubName) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=name.repository, repo_type=name.kind)
    return Path(constants.HF_HUB_CACHE).expanduser().resolve() / folder / "snapshots" / str(name.revision)


def is_inside(path: Path, directory: Path) -> bool:
    """Return whether a path leads into a directory, or through links of the hub's cache into its repository.

    The cache links every file of a snapshot to ``blobs/``; older versions of huggingface_hub linked local copies to it.
    """
    from huggingface_hub import constants

    here = directory.absolute()
    if not Path(os.path.normpath(path.absolute())).is_relative_to(os.path.normpath(here)):
        return False
    roots = [here, Path(constants.HF_HUB_CACHE)]
    if here.parent.name == "snapshots":  # REPOSITORY/snapshots/REVISION
        roots.append(here.parents[1])
    target = Path(os.path.realpath(path))  # unlike resolve(), it handles link loops
    return any(target.is_relative_to(os.path.realpath(root)) for root in roots)


def is_own_copy(directory: Path) -> bool:
    """Return whether ``fetch`` may write into a directory: it is empty, or was written by an earlier fetch."""
    return directory.is_dir() and ((directory / _LOCAL_RECORDS).is_dir() or not any(directory.iterdir()))


def _unverified(place: Path) -> Path:
    """Return the file that lists fetched files whose checksums are not verified yet."""
    if place.parent.name == "snapshots":
        return place.parents[1] / f"embodrl-unverified-{place.name}"
    return place / _LOCAL_RECORDS / "embodrl-unverified"


def _check(name: HubName, files: Sequence[RepoFile], num_bytes: int, place: Path) -> None:
    if not files:
        kinds = f"{name} has no file that embodrl reads"
        other = "dataset" if name.kind == "model" else "model"
        raise HubError(kinds, f"check the name; is it a {other}?", code="hub-missing")
    outside = [file.path for file in files if PurePosixPath(file.path).is_absolute() or ".." in file.path.split("/")]
    if outside:
        raise HubError(f"{name} has a file named {outside[0]!r}, outside of it", "do not use it", code="hub-content")
    large = [file for file in files if file.size > MAX_OTHER_BYTES and not file.path.endswith(WEIGHTS)]
    if large or len(files) > MAX_ENTRIES:
        what = f"{large[0].path} of {large[0].size:,} bytes" if large else f"more than {MAX_ENTRIES:,} files"
        raise HubError(
            f"{name} has {what}", "if this is correct, fetch it with the hub's own tools", code="hub-content"
        )
    parent = next(path for path in (place, *place.parents) if path.is_dir())
    free = shutil.disk_usage(parent).free
    if num_bytes + DISK_RESERVE_BYTES > free:
        raise HubError(
            f"{name} takes {num_bytes / 1e9:.1f} GB, and {parent} has {free / 1e9:.1f} GB free",
            "free disk space, or set HF_HOME to a directory on another disk",
            code="hub-disk",
        )


def _verify(name: HubName, file: RepoFile, path: Path) -> None:
    stated, found = (file.blob_id, _git_sha1(path)) if file.lfs is None else (file.lfs.sha256, _sha256(path))
    if found == stated:
        return
    for each in (Path(os.path.realpath(path)), path):  # the blob, and its link in the snapshot
        each.unlink(missing_ok=True)
    raise HubError(
        f"{file.path} of {name} does not match the hub's checksum and was removed",
        "run the command again; if that does not help, the proxy, mirror or disk corrupts data",
        code="hub-checksum",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git_sha1(path: Path) -> str:
    """Return git's id of a blob: SHA-1 of a header with its size, and the content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _transport_error() -> type[Exception]:
    """Return the base class of the hub's transport errors: httpx or httpx2, depending on huggingface_hub."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Convert errors of huggingface_hub in the block to ``HubError``. Messages contain no URL and no token."""
    from huggingface_hub import constants, errors, get_token

    denied = "accept its licence on the hub if required, and log in with `hf auth login`, or set HF_TOKEN"
    try:
        yield
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{name}: no such revision", "check the part after @", code="hub-missing") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401 and get_token():
            problem = f"{name}: the hub refuses the configured token (status 401)"
            hint = f"check HF_TOKEN, or `hf auth whoami`; if the token is right, check the name; {denied}"
            raise HubError(problem, hint, code="hub-token") from error
        if isinstance(error, errors.GatedRepoError) or status in (401, 403):
            problem = f"{name} does not exist on the hub, or is private or gated (status {status})"
            raise HubError(problem, f"check the name; {denied}", code="hub-access") from error
        if status == 404:
            raise HubError(f"{name} is not on the hub", "check the name", code="hub-missing") from error
        raise HubError(f"{name}: the hub returned status {status}", _LATER, code="hub-unreachable") from error
    except (errors.HFValidationError, errors.EntryNotFoundError) as error:
        raise HubError(f"{name}: {type(error).__name__}", "check the name", code="hub-missing") from error
    except (errors.RevisionResolutionError, errors.OfflineModeIsEnabled, _transport_error()) as error:
        if constants.HF_HUB_OFFLINE:
            problem = f"{name} is missing or incomplete in the hub's cache, and HF_HUB_OFFLINE is set"
            hint = _OFFLINE
            raise HubError(problem, hint, code="hub-offline") from error
        cause = type(error.__cause__ or error).__name__
        raise HubError(f"the hub could not be reached for {name}: {cause}", _LATER, code="hub-unreachable") from error
