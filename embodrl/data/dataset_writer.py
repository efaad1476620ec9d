"""Lifecycle of a dataset being written: staged, committed periodically, and renamed once complete.

Episodes are written to ``.NAME.partial``, which ``close`` renames to ``NAME``. ``commit`` syncs the added episodes and
records them in ``.NAME.commit.json``: after a kill or power failure the next writer continues from the last commit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

from embodrl.data.demos import DemoEpisode
from embodrl.errors import EmbodrlError, OutputError
from embodrl.fields import Fields, read_fields
from embodrl.storage.atomic import output_error, publish_directory, sync_directory, sync_tree
from embodrl.storage.integrity import write_checksums
from embodrl.storage.json_file import write_json_file

ELSEWHERE = "set collect.output_dir to a writable directory on another disk"


class DatasetWriter(ABC):
    """Writes demonstrations to a directory that appears once complete.

    Leaving the context without ``close`` discards uncommitted episodes.

    Args:
        directory: final path; must not exist or be empty.
        resume: continue an interrupted collection from its last commit; otherwise such a collection is an error.

    Attributes:
        staging: directory written to.
        progress: argument of the last ``commit`` of an interrupted collection; None for a new dataset.
        num_frames: frames of all episodes so far.

    Raises:
        EmbodrlError: the directory is not empty, another process writes it, or it holds an interrupted collection.
        OutputError: the directory can't be written; later, the disk is full.
    """

    format: str

    def __init__(self, directory: Path, resume: bool = False) -> None:
        self.directory = directory.absolute()
        self.staging = self.directory.with_name(f".{self.directory.name}.partial")
        self._commit_file = self.directory.with_name(f".{self.directory.name}.commit.json")
        self.progress: Fields | None = None
        self.num_frames = 0
        self._lock: int | None = None
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise EmbodrlError(f"{directory} exists and is not empty", "choose a new directory", code="dataset-exists")
        with self.output_errors():
            self.staging.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
        try:
            if self._commit_file.exists():
                self._recover(resume)
            else:
                self._remove_all_but(set())
        except BaseException:  # a failed commit, or a signal; re-raised
            self._unlock()
            raise

    # -- implemented by formats ------------------------------------------------------------------------------------

    @abstractmethod
    def _add(self, episode: DemoEpisode) -> None:
        """Add an episode."""

    @abstractmethod
    def _flush(self) -> dict[str, object]:
        """Finish all files; return the JSON that ``_restore`` needs."""

    @abstractmethod
    def _restore(self, state: Fields) -> None:
        """Continue from the result of ``_flush``."""

    @abstractmethod
    def _write_meta(self, meta: Mapping[str, object]) -> None:
        """Write the description of the complete dataset; ``meta`` records how it was made."""

    @abstractmethod
    def _stop(self) -> None:
        """Stop processes that write files."""

    # -- public ----------------------------------------------------------------------------------------------------

    def add(self, episode: DemoEpisode) -> None:
        """Add an episode."""
        with self.output_errors():
            self._add(episode)

    def commit(self, progress: Mapping[str, object]) -> None:
        """Make the added episodes durable; ``progress`` is JSON that the collection needs to continue."""
        if self._lock is None:  # after an error raised by ``add``
            return
        with self.output_errors():
            state = self._flush()
            sync_tree(self.staging)
            content = {
                "format": self.format,
                "progress": dict(progress),
                "writer": state,
                "files": sorted(self._files()),
            }
            write_json_file(self._commit_file, content)

    def close(self, meta: Mapping[str, object]) -> None:
        """Write remaining episodes and ``meta`` (how the dataset was made), then rename to the final path."""
        if self._lock is None:  # after an error raised by ``add`` or ``commit``
            return
        with self.output_errors():
            self._flush()
            self._write_meta(meta)
            write_checksums(self.staging)
            sync_tree(self.staging)
            publish_directory(self.staging, self.directory)
            # Only now: until the rename, a kill must find the commit.
            self._commit_file.unlink(missing_ok=True)
            sync_directory(self.directory.parent)
        self._unlock()

    def abort(self) -> None:
        """Discard uncommitted episodes."""
        if self._lock is None:
            return
        self._stop()
        if not self._commit_file.exists():
            shutil.rmtree(self.staging, ignore_errors=True)
        self._unlock()

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @contextlib.contextmanager
    def output_errors(self) -> Iterator[None]:
        """Convert an OSError in the block to an OutputError and discard uncommitted episodes."""
        try:
            yield
        except (OSError, OutputError) as error:
            kept = self._commit_file.exists()
            self.abort()
            if isinstance(error, OutputError):
                raise
            hint = "free disk space and repeat the command, which continues; or " * kept + ELSEWHERE
            what = f"demonstrations can't be written to {self.directory}"
            raise output_error(what, self.directory, error, hint) from error

    # -- interrupted collections ----------------------------------------------------------------------------------

    def _locked(self) -> int:
        """Lock the staging directory until the process ends."""
        descriptor = os.open(self.staging, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise EmbodrlError(
                f"another process is collecting into {self.directory}",
                "wait until it ends, or choose another directory",
                code="dataset-in-use",
            ) from error
        except OSError:  # some network file systems do not support locks
            pass
        return descriptor

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _recover(self, resume: bool) -> None:
        hint = f"remove it to start over: rm -r {self.staging} {self._commit_file}"
        if not resume:
            raise EmbodrlError(
                f"{self.staging} holds an interrupted collection",
                f"repeat its `embodrl collect`, which continues it; or {hint}",
                code="dataset-interrupted",
            )
        commit = read_fields(self._commit_file, hint=hint)
        if commit.text("format") != self.format:
            commit.refuse(f"it is of format {commit.text('format')}, not {self.format}")
        files = set(commit.texts("files"))
        if lost := sorted(files - self._files()):
            commit.refuse(f"{self.staging / lost[0]} is missing")
        self._remove_all_but(files)
        self._restore(commit.fields("writer"))
        self.progress = commit.fields("progress")

    def _files(self) -> set[str]:
        return {path.relative_to(self.staging).as_posix() for path in self.staging.rglob("*") if not path.is_dir()}

    def _remove_all_but(self, kept: set[str]) -> None:
        for name in self._files() - kept:
            (self.staging / name).unlink(missing_ok=True)
