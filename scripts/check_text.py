"""Refuse paths of one machine and package hosts: ``check_text.py [FILE ...]``, all tracked files by default."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# In pieces, so that this file does not match itself.
MACHINE_PATHS = ("ho" + r"me/\w", "ro" + "ot/", "wo" + "rk/", "Us" + r"ers/\w")
HOSTS = (r"py" + r"pi\.", "files.python" + "hosted", "download.py" + "torch", "deb.deb" + "ian", "archive.ub" + "untu")
PATTERNS = {
    "a path of somebody's machine": re.compile(r"(?<![\w.*])/(?:" + "|".join(MACHINE_PATHS) + ")"),
    "a package host (the choice is pip's and apt's configuration)": re.compile("|".join(HOSTS)),
}
EXEMPT = {"LICENSE"}


def problems_of(path: str, text: str) -> list[str]:
    """Return ``path:line: what`` for each match."""
    return [
        f"{path}:{number}: {what}: {line.strip()[:120]}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in PATTERNS.items()
        if pattern.search(line)
    ]


def tracked() -> list[str]:
    """Return the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name]


def main(names: Sequence[str]) -> int:
    """Check the named files, or every tracked one."""
    problems: list[str] = []
    for name in names or tracked():
        path = ROOT / name
        if name in EXEMPT or not path.is_file():
            continue
        try:
            problems += problems_of(name, path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # not text
    print("\n".join(problems) or "no machine's paths, no package hosts")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
