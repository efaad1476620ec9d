"""Checkpoints that are either complete or absent.

``DIR/checkpoints/step_<n>/`` holds one safetensors file per group of tensors, ``state.json``, one ``.bin`` file per
blob, and ``manifest.json`` with the size and SHA-256 of every file. A sharded training state has one directory per
section, holding the files of all processes. A checkpoint is written to a hidden directory, synced, and renamed into
place. Nothing is pickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from embodrl.errors import CheckpointError, OutputError
from embodrl.fields import Fields, read_fields, read_regular_file
from embodrl.storage.atomic import (
    format_size,
    output_error,
    output_errors,
    publish_directory,
    remove,
    sync_directory,
    write_file,
)
from embodrl.storage.files import safetensors_bytes
from embodrl.storage.integrity import sha256_of
from embodrl.storage.tensor_files import load_tensors

logger = logging.getLogger(__name__)

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
CHECKPOINTS_DIR = "checkpoints"
BEST = "best"
_STAGING = ".staging_"
_REPLACED = ".replaced_"
MAX_BLOB_BYTES = 4 * 2**30
MAX_NAMED = 5
"""Maximum number of damaged checkpoints listed by name."""
ELSEWHERE = "set runner.output_dir to a writable directory on another disk"
_T = TypeVar("_T")
_STEP_NAME = re.compile(r"step_([0-9]+)")
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk: completed iterations (``step``), directory, and content of ``state.json``."""

    step: int
    path: Path
    state: Fields

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return a group of tensors on the CPU; CheckpointError if it is missing or damaged."""
        return self._read(f"{name}.safetensors", load_tensors)

    def blob(self, name: str) -> bytes:
        """Return a blob; CheckpointError if it is missing or too large."""
        return self._read(f"{name}.bin", lambda path: read_regular_file(path, MAX_BLOB_BYTES, follow_links=True))

    def _read(self, file_name: str, read: Callable[[Path], _T]) -> _T:
        path = self.path / file_name
        if not path.is_file():
            raise CheckpointError(
                f"{self.path} has no {file_name}",
                "resume with the version of embodrl that wrote the checkpoint",
                code="checkpoint-damaged",
            )
        try:
            return read(path)
        except OSError as error:
            reason = error.strerror or error
            hint = "resume a copy of the run, or a run of your own"
            raise CheckpointError(f"{path} can't be read: {reason}", hint, code="checkpoint-damaged") from error


class CheckpointManager:
    """Writes, finds and removes the checkpoints of a run in ``directory/checkpoints``, keeping ``keep_last_n``."""

    def __init__(self, directory: Path, keep_last_n: int) -> None:
        self.root = Path(directory) / CHECKPOINTS_DIR
        self.keep_last_n = keep_last_n
        # Damaged checkpoints do not count toward keep_last_n and are removed at the next save.
        self._known_bad: set[str] = set()
        link = self.root / BEST
        self._best = link.readlink().name if link.is_symlink() else None

    def keep_best(self, step: int) -> None:
        """Keep the checkpoint of ``step`` beyond ``keep_last_n`` and link ``checkpoints/best`` to it.

        It may be saved later; until then there is no link. The previous best is released.
        """
        self._best = f"step_{step}"
        self._link_best()

    def _link_best(self) -> None:
        if self._best is None:
            return
        link = self.root / BEST
        partial = self.root / f".{BEST}.partial"
        try:
            if (self.root / self._best).is_dir():
                partial.unlink(missing_ok=True)
                partial.symlink_to(self._best)
                # Replace the link by a rename, so that it exists at every moment.
                partial.replace(link)
            else:
                link.unlink(missing_ok=True)
        except OSError as error:  # a file system without links: the checkpoint is kept anyway
            logger.warning("%s could not be linked to %s: %s", link, self._best, error)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, object],
        blobs: Mapping[str, bytes] | None = None,
        write_shards: Callable[[Path], Mapping[str, Mapping[str, object]]] | None = None,
    ) -> Path:
        """Write a checkpoint, verify it, remove expired ones, and return its directory.

        Args:
            step: completed iterations.
            tensors: groups of tensors by name.
            state: JSON-serialisable state.
            blobs: opaque bytes by name.
            write_shards: writes and syncs more files into subdirectories of the given directory, possibly from other
                processes, and returns their sizes and checksums like ``TrainEngine.save_shards``.

        Raises:
            OutputError: the disk is full, read-only or failing. Earlier checkpoints are untouched and no partial
                checkpoint is left, so that the run may continue.
        """
        final = self.root / f"step_{step}"
        staging = self.root / f"{_STAGING}step_{step}"
        parts = _parts(tensors, state, blobs or {})
        try:
            self._make_root()
            remove(staging)
            staging.mkdir()
            files: dict[str, Mapping[str, object]] = {}
            files |= {name: _write_file(staging / name, chunks()) for name, chunks in parts.items()}
            if write_shards is not None:
                files |= write_shards(staging)
                # The writers synced their files, but not the directory entries.
                for directory in _subdirectories(staging):
                    sync_directory(directory)
            # Last, because it lists all other files.
            _write_file(staging / MANIFEST, iter([_manifest(step, files)]))
            sync_directory(staging)
            # Verify it in its final place before removing the checkpoint it replaces.
            publish_directory(staging, final, self.root / f"{_REPLACED}{final.name}", _problem)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            what = f"checkpoint {final} could not be written"
            elsewhere = f"lower runner.keep_last_n, or {ELSEWHERE}" if error.errno == errno.ENOSPC else ELSEWHERE
            raise output_error(what, self.root, error, elsewhere) from error
        self._known_bad.discard(final.name)
        self._link_best()
        self._prune(final)
        return final

    def _make_root(self) -> None:
        if not self.root.is_dir():
            self.root.mkdir(parents=True)
            # The directory entry must survive a power failure too.
            sync_directory(self.root.parent)

    def _prune(self, written: Path) -> None:
        """Remove all but the newest checkpoints, the best, and the one just written (whatever its step)."""
        others = [path for path in self.steps() if path != written]
        good = [path for path in others if path.name not in self._known_bad]
        bad = [path for path in others if path.name in self._known_bad]
        # The checkpoint just written takes one of the places.
        old = [path for path in good[self.keep_last_n - 1 :] if path.name != self._best]
        for path in (*bad, *old):
            try:
                # Rename first: a partly removed checkpoint under its own name would be reported as damaged.
                doomed = path.with_name(f"{_STAGING}{path.name}")
                remove(doomed)
                path.rename(doomed)
                remove(doomed)
            except OSError as error:
                logger.warning("old checkpoint %s could not be removed: %s", path, error)

    def latest_good(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint whose checksums match, and the problems of newer ones.

        Removes leftovers of an interrupted save; OutputError if they can't be removed.
        """
        with output_errors(f"leftovers in {self.root} could not be removed", self.root, ELSEWHERE):
            self._clean()
        problems: list[str] = []
        for path in self.steps():
            problem = _problem(path)
            if not problem:
                return _open(path), _counted(problems)
            self._known_bad.add(path.name)
            problems.append(f"{path}: {problem}")
            if len(problems) <= MAX_NAMED:
                logger.warning("checkpoint %s is not used: %s", path, problem)
        return None, _counted(problems)

    def _clean(self) -> None:
        if not self.root.is_dir():
            return
        for path in sorted(self.root.iterdir()):
            original = self.root / path.name.removeprefix(_REPLACED)
            if path.name.startswith(_REPLACED) and _problem(original):
                remove(original)
                path.rename(original)  # killed before the new checkpoint was in place and verified
            elif path.name.startswith((_STAGING, _REPLACED)):
                remove(path)

    def steps(self) -> list[Path]:
        """Return the visible checkpoints, newest first."""
        if not self.root.is_dir():
            return []
        found = {int(match[1]): path for path in self.root.iterdir() if (match := _STEP_NAME.fullmatch(path.name))}
        return [found[step] for step in sorted(found, reverse=True)]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open ``RUN/checkpoints/step_N`` read-only; CheckpointError if it is missing or its checksums do not match."""
    steps = [step for step in CheckpointManager(path.parent.parent, 1).steps() if step.name != path.name]
    others = ", ".join(_shortened([step.name for step in steps]))
    hint = f"the run has {others}" if steps else "the run has no other checkpoint"
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist", hint, code="checkpoint-not-found")
    if problem := _problem(path):
        raise CheckpointError(f"checkpoint {path} is damaged: {problem}", hint, code="checkpoint-damaged")
    return _open(path)


def newest_checkpoint(run_dir: Path) -> Checkpoint:
    """Open a run's newest intact checkpoint read-only; the run may be training. CheckpointError if there is none."""
    problems: list[str] = []
    for path in CheckpointManager(run_dir, 1).steps():
        if problem := _problem(path):
            problems.append(f"{path}: {problem}")
        else:
            return _open(path)
    why = "; ".join(_shortened(problems)) or "none has been written yet"
    hint = f"`embodrl resume {run_dir}` continues the run"
    raise CheckpointError(f"{run_dir} has no intact checkpoint: {why}", hint, code="checkpoint-missing")


def _counted(problems: list[str]) -> list[str]:
    """Return the first problems and the number of the rest, and log that number."""
    if len(problems) > MAX_NAMED:
        logger.warning("%d more checkpoints are not used", len(problems) - MAX_NAMED)
    return _shortened(problems)


def _shortened(names: list[str]) -> list[str]:
    """Return the first names and the number of the rest: a foreign run directory may hold any number."""
    return names if len(names) <= MAX_NAMED else [*names[:MAX_NAMED], f"and {len(names) - MAX_NAMED} more"]


def preflight(directory: Path, bytes_needed: int) -> None:
    """Check that the run directory, created if missing, is writable and has ``bytes_needed`` free.

    Raises OutputError.
    """
    probe = Path(directory) / ".write_probe"
    with output_errors(f"output directory {directory} can't be written", Path(directory), ELSEWHERE):
        Path(directory).mkdir(parents=True, exist_ok=True)
        probe.unlink(missing_ok=True)  # left by a killed run
        _write_file(probe, iter([b"embodrl"]))
        probe.unlink()
        free = shutil.disk_usage(directory).free
    if free < bytes_needed:
        raise OutputError(
            f"output directory {directory} has {format_size(free)} free;"
            f" checkpoints and policies need about {format_size(bytes_needed)}",
            f"free disk space, lower runner.keep_last_n, or {ELSEWHERE}",
            code="disk-space",
        )


def _parts(
    tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, object], blobs: Mapping[str, bytes]
) -> dict[str, Callable[[], Iterator[bytes | memoryview]]]:
    """Return the content of each file as functions, so that only one tensor at a time is copied off the device."""
    for name in (*tensors, *blobs):
        assert _PART_NAME.fullmatch(name) and f"{name}.json" not in (STATE, MANIFEST), name
    # Encode first, so that a state JSON can't hold fails before anything is written.
    encoded_state = json.dumps(state).encode()
    parts: dict[str, Callable[[], Iterator[bytes | memoryview]]] = {STATE: lambda: iter([encoded_state])}
    for name, group in tensors.items():
        parts[f"{name}.safetensors"] = lambda group=group: safetensors_bytes(group)
    for name, blob in blobs.items():
        parts[f"{name}.bin"] = lambda blob=blob: iter([blob])
    return parts


def _manifest(step: int, files: Mapping[str, Mapping[str, object]]) -> bytes:
    content = {"format": FORMAT, "step": step, "files": files}
    # The manifest carries its own checksum: nothing else would reveal damage to it.
    return json.dumps(content | {"checksum": _content_hash(content)}, indent=1).encode()


def _content_hash(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _problem(path: Path) -> str:
    """Return what is wrong with a checkpoint, or "" if its checksums match."""
    try:
        files = _listed_files(path)
        for name in files:
            _check_file(path, name, files.fields(name))
        # The shard reader reads every file in the directory.
        found = {str(file.relative_to(path)) for directory in _subdirectories(path) for file in directory.iterdir()}
        if unknown := found - set(files):
            return f"{min(unknown)} is not in {MANIFEST}"
    except CheckpointError as error:
        return error.message
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"it can't be read: {error}"
    return ""


def _listed_files(path: Path) -> Fields:
    """Return the files of a checkpoint by name, each with its size and SHA-256.

    Raises CheckpointError if the manifest is damaged or belongs to another checkpoint.
    """
    (path / MANIFEST).stat()  # a missing file is reported as such
    manifest = read_fields(path / MANIFEST, CheckpointError)
    content = {name: value for name, value in manifest.content.items() if name != "checksum"}
    if manifest.text("checksum") != _content_hash(content):
        raise CheckpointError(f"{MANIFEST} is damaged", code="checkpoint-damaged")
    made = manifest.integer("format")
    step = manifest.integer("step")
    if made != FORMAT or f"step_{step}" != path.name:
        raise CheckpointError(f"{MANIFEST} is of format {made} and step {step}", code="checkpoint-damaged")
    return manifest.fields("files")


def _check_file(path: Path, name: str, facts: Fields) -> None:
    """Compare a file with the manifest; CheckpointError if it differs."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{name!r} in {MANIFEST} leaves the directory", code="checkpoint-damaged")
    size = (path / name).stat().st_size
    written = facts.integer("num_bytes")
    if size != written:
        raise CheckpointError(f"{name} has {size} bytes instead of {written}", code="checkpoint-damaged")
    if sha256_of(path / name) != facts.text("sha256"):
        raise CheckpointError(f"the checksum of {name} does not match", code="checkpoint-damaged")


def _subdirectories(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if entry.is_dir()]


def _open(path: Path) -> Checkpoint:
    hint = "resume with the version of embodrl that wrote the checkpoint"
    state = read_fields(path / STATE, CheckpointError, hint)
    return Checkpoint(int(path.name.removeprefix("step_")), path, state)


def newest_state(run_dir: Path) -> Fields | None:
    """Return the state of the newest checkpoint whose manifest and ``state.json`` are intact; None if there is none.

    Read-only; skips the other files of the checkpoint, which may be large.
    """
    for path in CheckpointManager(run_dir, 1).steps():
        try:
            _check_file(path, STATE, _listed_files(path).fields(STATE))
            return _open(path).state
        # An older state is better than none.
        except (CheckpointError, OSError):
            continue
    return None


def _write_file(path: Path, chunks: Iterator[bytes | memoryview]) -> Mapping[str, object]:
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            digest.update(chunk)
            yield chunk

    return {"num_bytes": write_file(path, hashed()), "sha256": digest.hexdigest()}
