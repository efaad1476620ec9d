"""Records what a command does to the files below a directory, by strace: every process, native writers included.

strace needs no privileges for processes that it starts itself. Content is recorded with each write, so that the
directory can be rebuilt as it was after any operation.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OPENING = ("open", "openat", "creat")
WRITING = ("write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range")
SIZING = ("truncate", "ftruncate", "fallocate")
SYNCING = ("fsync", "fdatasync")
NAMING = (
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat"),
    *("unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"),
)
FORKING = ("clone", "clone3", "fork", "vfork")
CALLS = (*OPENING, *WRITING, *SIZING, *SYNCING, *NAMING, *FORKING, "lseek", "mmap", "chdir", "fchdir")
_LONGEST_WRITE = 1 << 27
_HEX = r"(?:\\x[0-9a-f]{2})*"
_LINE = re.compile(r"^(\d+)\s+(\w+)\((.*)\)\s+= (-?\d+)(?:<(" + _HEX + r")>)?", re.DOTALL)
_DESCRIPTOR = re.compile(r"(\d+|AT_FDCWD)<(" + _HEX + r")>(\(deleted\))?")
_STRING = re.compile(r'"(' + _HEX + r')"')


@dataclass(frozen=True)
class Op:
    """One operation below the recorded directory; paths are relative to it.

    Attributes:
        kind: create, write, truncate, sync, rename, link, symlink, unlink, mkdir, rmdir.
        path: of the file or directory; for rename and link, the old name.
        other: the new name, or the target of a symlink.
        offset: of a write; the size for truncate.
        data: of a write.
    """

    kind: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""

    def __str__(self) -> str:
        detail = f" {len(self.data):,} bytes at {self.offset:,}" if self.kind == "write" else ""
        return f"{self.kind} {self.path}{f' -> {self.other}' if self.other else ''}{detail}"


class RecordingError(Exception):
    """Something was done to the files that can't be recorded."""


def missing_tool() -> str:
    """Return why nothing can be recorded here, or ""."""
    if shutil.which("strace") is None:
        return "strace is not installed (apt-get install strace)"
    probe = subprocess.run(["strace", "-f", "-o", os.devnull, "true"], capture_output=True, text=True, check=False)
    return f"strace can't be used here: {probe.stderr.strip()}" if probe.returncode else ""


def record(
    command: Sequence[str], root: Path, environ: Mapping[str, str], exit_codes: Sequence[int] = (0,)
) -> list[Op]:
    """Run a command and return what it and its children did below ``root``, in order.

    Raises:
        RecordingError: it failed, or changed files in a way that strace does not show (shared memory).
    """
    root = root.resolve()
    sizes = {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place, "trace")
        strace = ["strace", "-f", "-y", "-xx", "-s", str(_LONGEST_WRITE), "--seccomp-bpf", "-o", str(trace)]
        strace += ["-e", f"trace={','.join(CALLS)}", "--signal=none"]
        done = subprocess.run([*strace, *command], capture_output=True, text=True, env=environ, cwd=place, check=False)
        if done.returncode not in exit_codes:
            raise RecordingError(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
        with trace.open(encoding="ascii", errors="replace") as lines:
            return list(_Parser(root, Path(place), sizes).parse(lines))


@dataclass
class _Opened:
    """A file as a process has opened it."""

    position: int
    appending: bool = False


class _Parser:
    """Turns lines of strace into operations; follows the position of each open file.

    A write through a descriptor that was not seen to be opened, such as a child's standard output, continues where
    the file was opened last. What this gets wrong shows when the operations are replayed.
    """

    def __init__(self, root: Path, directory: Path, sizes: Mapping[str, int]) -> None:
        self.root, self.directory = f"{root}/", str(directory)
        self.directories: dict[str, str] = {}  # of processes that have changed theirs
        self.known = dict(sizes)  # of the files below the root
        self.opened: dict[tuple[str, int], _Opened] = {}  # by path and descriptor
        self.latest: dict[str, _Opened] = {}

    def parse(self, lines: Iterator[str]) -> Iterator[Op]:
        marker = self.root.encode().hex()
        needle = "".join(f"\\x{marker[i : i + 2]}" for i in range(0, len(marker) - 2, 2))
        always = (*NAMING, *FORKING, "chdir", "fchdir")  # their paths may be relative
        for line in _whole(lines):
            if (needle in line or line.split("(", 1)[0].split()[-1] in always) and (match := _LINE.match(line)):
                process, name, arguments, result, opened = match.groups()
                if result.startswith("-"):  # strace's own filter loses calls that others interrupt
                    continue
                yield from self._call(process, name, arguments, int(result), opened)

    def _call(self, process: str, name: str, arguments: str, result: int, opened: str | None) -> Iterator[Op]:
        directory = self.directories.get(process, self.directory)
        if name in FORKING:
            self.directories.setdefault(str(result), directory)
        elif name in ("chdir", "fchdir"):
            path = _text(_STRING.findall(arguments)[0] if name == "chdir" else _DESCRIPTOR.findall(arguments)[0][1])
            self.directories[process] = os.path.normpath(os.path.join(directory, path))  # noqa: PTH118
        elif name in OPENING:
            yield from self._open(name, arguments, result, _text(opened or ""))
        elif name in NAMING:
            yield from self._name(name, arguments, directory)
        else:
            found = list(_DESCRIPTOR.finditer(arguments))
            match = found[name == "copy_file_range"] if found else None  # its source comes first
            path = self._inside(_text(match[2])) if match and not match[3] else None
            if name == "truncate":
                path = self._inside(_text(_STRING.findall(arguments)[0]))
            if path is not None:
                number = int(match[1]) if match else -1
                yield from self._content(name, arguments, path, number, result)

    def _content(self, name: str, arguments: str, path: str, number: int, result: int) -> Iterator[Op]:
        file = self.opened.get((path, number)) or self.latest.setdefault(path, _Opened(self.known.get(path, 0)))
        if name in SYNCING:
            yield Op("sync", path)
        elif name == "mmap":
            if "PROT_WRITE" in arguments and "MAP_SHARED" in arguments:
                raise RecordingError(f"{path} is written through shared memory")
        elif name == "lseek":
            file.position = result
        elif name in SIZING:
            size = int(arguments.rsplit(", ", 1)[1])
            if name == "fallocate":
                size = max(self.known.get(path, 0), size + int(arguments.rsplit(", ", 2)[1]))
            self.known[path] = size
            yield Op("truncate", path, offset=size)
        else:
            if file.appending:
                file.position = self.known.get(path, 0)
            at = int(arguments.rsplit(", ", 1)[1]) if name.startswith("pw") else file.position
            data = self._written(name, arguments, path, at)[:result]
            if not name.startswith("pw"):
                file.position += len(data)
            self.known[path] = max(self.known.get(path, 0), at + len(data))
            yield Op("write", path, offset=at, data=data)

    def _written(self, name: str, arguments: str, path: str, at: int) -> bytes:
        if name not in ("sendfile", "copy_file_range"):
            return b"".join(_bytes(part) for part in _STRING.findall(arguments))
        source = _text(_DESCRIPTOR.findall(arguments)[name == "sendfile"][1])
        if self._inside(source) is not None:
            raise RecordingError(f"{path} is copied from {source} in the kernel")
        return Path(source).read_bytes()[at:]

    def _open(self, name: str, arguments: str, number: int, opened: str) -> Iterator[Op]:
        path = self._inside(opened)
        writable = name == "creat" or "O_WRONLY" in arguments or "O_RDWR" in arguments
        if path is None:
            return
        self.opened[path, number] = file = _Opened(0, "O_APPEND" in arguments)
        if not writable:
            return
        self.latest[path] = file
        if path not in self.known and ("O_CREAT" in arguments or name == "creat"):
            self.known[path] = 0
            yield Op("create", path)
        elif name == "creat" or "O_TRUNC" in arguments:
            self.known[path] = 0
            yield Op("truncate", path, offset=0)

    def _name(self, name: str, arguments: str, directory: str) -> Iterator[Op]:
        strings = [_text(part) for part in _STRING.findall(arguments)]
        folders = [_text(folder) for _, folder, _ in _DESCRIPTOR.findall(arguments)] or [directory]
        if name.startswith("symlink"):
            path = self._inside(strings[1], folders[0])
            if path is not None:
                yield Op("symlink", path, strings[0])
            return
        paths = [self._inside(text, folders[min(i, len(folders) - 1)]) for i, text in enumerate(strings)]
        if all(path is None for path in paths):
            return
        if None in paths:
            raise RecordingError(f"{name} of {strings} crosses the border of {self.root}")
        path, other = (*paths, "")[:2]
        assert path is not None and other is not None
        kind = next(kind for kind in ("rename", "symlink", "link", "rmdir", "mkdir", "unlink") if kind in name)
        if kind == "link" and name.startswith("unlink"):
            kind = "rmdir" if "AT_REMOVEDIR" in arguments else "unlink"
        self._forget(kind, path, other)
        yield Op(kind, path, other)

    def _forget(self, kind: str, path: str, other: str) -> None:
        """Move what is known of files that are renamed, and drop it of those that are removed or replaced."""
        if kind in ("mkdir", "symlink"):
            return
        if kind == "link":
            self.known[other] = self.known.get(path, 0)
            return
        for facts in (self.known, self.latest, self.opened):
            moved: dict[object, object] = {}
            for key in list(facts):
                known = key if isinstance(key, str) else key[0]
                if known == path or known.startswith(f"{path}/"):
                    new = other + known[len(path) :]
                    moved[new if isinstance(key, str) else (new, key[1])] = facts.pop(key)  # type: ignore[call-overload]
                elif known == other and kind == "rename":
                    del facts[key]  # type: ignore[arg-type]
            if kind == "rename":
                facts.update(moved)  # type: ignore[arg-type]

    def _inside(self, path: str, folder: str = "") -> str | None:
        """Return a path relative to the root, or None if it lies elsewhere; the root itself is ``.``."""
        whole = os.path.normpath(os.path.join(folder or self.directory, path))  # noqa: PTH118  may be relative
        if f"{whole}/" == self.root:
            return "."
        return whole.removeprefix(self.root) if whole.startswith(self.root) else None


def _whole(lines: Iterator[str]) -> Iterator[str]:
    """Join calls that others have interrupted, at the place where they ended."""
    begun: dict[str, str] = {}
    for line in lines:
        process, _, rest = line.partition(" ")
        if line.endswith(" <unfinished ...>\n"):
            begun[process] = line.removesuffix(" <unfinished ...>\n")
        elif rest.lstrip().startswith("<... "):
            yield begun.pop(process, process) + rest.partition(" resumed>")[2]
        else:
            yield line


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _text(text: str) -> str:
    return os.fsdecode(_bytes(text))
