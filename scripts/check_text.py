"""Refuse text that names one machine or package host, notes to self, and wording that is not the field's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# In pieces, so that this file does not match itself.
MACHINE_PATHS = ("ho" + r"me/\w", "ro" + "ot/", "wo" + "rk/", "Us" + r"ers/\w")
HOSTS = (r"py" + r"pi\.", "files.python" + "hosted", "download.py" + "torch", "deb.deb" + "ian", "archive.ub" + "untu")
PATTERNS = {
    "a path of somebody's machine": re.compile(r"(?<![\w.*])/(?:" + "|".join(MACHINE_PATHS) + ")"),
    "a package host (the choice is pip's and apt's configuration)": re.compile("|".join(HOSTS)),
    "a note to self": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b"),
}
EXEMPT = {"LICENSE"}
WORDING = {
    r"bit-exact(ly), bit-identical": r"\bto the bit\b",
    "again, rebuilt, restarted": r"\banew\b",
    "fix": r"\bmend(s|ed|ing)?\b",
    "reported, given, called with": r"\b(is|are|was|were|be|as) told\b|\btold (apart|beside|with|by)\b",
    "custom, your own": r"\bof yours\b",
    "applied, used": r"\b(taken|takes?|took) over\b",
    "continue": r"\b(go|goes|went|going) on\b(?! (to|at|with|the)\b)",
    "the passive": r"\bnobody\b",
    "dataset": r"\bdata sets?\b",
    "and the like, and its variants": r"\bkin\b",
    "hint": r"\bremed(y|ies)\b(?!:)",
    "forever": r"\bfor ever\b",
    "interrupted": r"\bbroken? off\b|\bbreaks? off\b",
    "available": r"\bto be had\b|\bcan('t|not) be had\b",
    "anyway": r"\ball the same\b(?!,)",
    "started": r"\bbrought up\b(?! to)",
    "not a": r"\b(it|that|what|which) is no (?!longer|more|less|such|part|other|need|way|room|one|use)[a-z]",
    "per": r"\b(values?|steps|episodes|chunks|bytes|numbers?|tokens|actions) an? "
    r"(second|chunk|process|core|device|episode|iteration|machine|rank|update|evaluation|rollout|row)\b",
}
"""What to write instead of phrases that readers of the field would not search for."""
PHRASES = {f"wording (rather: {better})": re.compile(phrase, re.IGNORECASE) for better, phrase in WORDING.items()}
RESULTS, THIS_FILE = "benchmarks/results/", "scripts/check_text.py"


def problems_of(path: str, text: str) -> list[str]:
    """Return ``path:line: what`` for each match."""
    patterns = PATTERNS if path == THIS_FILE or path.startswith(RESULTS) else PATTERNS | PHRASES
    return [
        f"{path}:{number}: {what}: {line.strip()[:120]}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in patterns.items()
        if pattern.search(line)
    ]


def main() -> int:
    """Check every tracked text file."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    problems: list[str] = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if name in EXEMPT or not path.is_file():
            continue
        try:
            problems += problems_of(name, path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # not text
    print("\n".join(problems) or "no machine's paths, no package hosts, no notes to self, plain wording")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
