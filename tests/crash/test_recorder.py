"""The recorder, against a program whose operations are known."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from disk_model import Disk, read_tree
from recorder import Op, RecordingError, missing_tool, record

pytestmark = pytest.mark.skipif(bool(missing_tool()), reason=missing_tool())

PROGRAM = """
import os, shutil, subprocess, sys
from pathlib import Path
os.chdir(sys.argv[1])
Path("a.txt").write_bytes(b"one")                      # relative to a directory that is changed to
with open("a.txt", "ab") as file:
    file.write(b"two"); file.flush(); os.fsync(file.fileno())
os.mkdir("d"); os.rename("a.txt", "d/a.txt")
with open("d/a.txt", "r+b") as file:
    file.seek(1); file.write(b"NE"); file.truncate(5)
folder = os.open("d", os.O_RDONLY); os.fsync(folder)
os.unlink("a.txt", dir_fd=folder) if os.fork() == 0 and not os._exit(0) else os.wait()
with open("log", "wb", buffering=0) as log:
    log.write(b"parent ")
    subprocess.run([sys.executable, "-c", "print('child', flush=True)"], stdout=log, check=True)
    log.write(b"parent")
shutil.copyfile(sys.argv[2], "copy"); os.symlink("copy", "link"); os.mkdir("e"); os.rmdir("e")
os.copy_file_range(os.open(sys.argv[2], os.O_RDONLY), os.open("range", os.O_WRONLY | os.O_CREAT), 6)
Path("range").rename("old"); Path("old").open("ab").write(b"!")
os.pwrite(os.open("p", os.O_WRONLY | os.O_CREAT), b"tail", 3)
"""


def environ() -> dict[str, str]:
    return {"PATH": os.environ["PATH"]}


def test_what_a_program_and_its_children_do_is_recorded(tmp_path: Path) -> None:
    root, source = tmp_path / "root", tmp_path / "source"
    root.mkdir()
    (root / "old").write_bytes(b"?")
    source.write_bytes(b"copied in the kernel")
    start = read_tree(root)
    ops = record([sys.executable, "-c", PROGRAM, str(root), str(source)], root, environ())
    assert ops[:6] == [
        Op("create", "a.txt"),
        Op("write", "a.txt", data=b"one"),
        Op("write", "a.txt", offset=3, data=b"two"),
        Op("sync", "a.txt"),
        Op("mkdir", "d"),
        Op("rename", "a.txt", "d/a.txt"),
    ]
    assert Op("write", "d/a.txt", offset=1, data=b"NE") in ops and Op("sync", "d") in ops
    assert Op("write", "log", offset=7, data=b"child\n") in ops
    disk = Disk(start)
    for op in ops:
        disk.apply(op)
    assert disk.tree() == read_tree(root)
    assert dict(disk.tree()) == {
        "copy": b"copied in the kernel",
        "d": None,
        "d/a.txt": b"oNEtw",
        "link": "copy",
        "log": b"parent child\nparent",
        "old": b"copied!",
        "p": b"\0\0\0tail",
    }


def test_what_can_not_be_recorded_is_refused(tmp_path: Path) -> None:
    shared = "import mmap, sys; f = open(sys.argv[1], 'w+b'); f.truncate(9); mmap.mmap(f.fileno(), 9)[0] = 1"
    with pytest.raises(RecordingError, match="shared memory"):
        record([sys.executable, "-c", shared, str(tmp_path / "x")], tmp_path, environ())
    with pytest.raises(RecordingError, match="ended with 3"):
        record([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, environ())
