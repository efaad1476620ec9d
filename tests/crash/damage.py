"""Files of a run, a policy or a dataset with one place changed: head, middle, end, and each value of a JSON file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from disk_model import Tree
from scenarios import COLLECT, EVALUATE, FINE_TUNE, Bench, Result, Scenario, evaluated, run_result, trained_on

NOT_READ = ("logs/", "tensorboard/", ".lock", "report.html", "videos/")
"""What no recovery reads."""
_JSON = (".json", ".jsonl", ".yaml")
_MOST_FIELDS = 24
"""Of a file; more of them are sampled evenly."""
_VALUE = re.compile(rb'(?<=[:\[,\s])(-?\d[\d.e+-]*|"(?:[^"\\]|\\.)*"|true|false|null)(?=\s*[,}\]\n])')


@dataclass(frozen=True)
class Damaged:
    """What is damaged, and how it is used.

    Attributes:
        name: in the table.
        command: command lines that make it in ``dir``; empty: a copy of the input ``start``.
        scenario: whose recovery and result count.
    """

    name: str
    command: Sequence[Sequence[str]]
    scenario: Scenario
    start: str = ""

    def make(self, bench: Bench, place: Path) -> tuple[Path, Result]:
        """Make it; return its directory and what using it leads to."""
        import shutil

        bench.prepare("interrupted")
        directory = place / "dir"
        if self.start:
            shutil.copytree(bench.base / self.start, directory, symlinks=True)
        for arguments in self.command:
            done = bench.run(arguments, directory)
            assert done.code == 0, done.stderr
        used = place / "used"
        shutil.copytree(directory, used, symlinks=True)
        outcome, result = bench.recover(self.scenario, used, place / "out")
        assert result is not None, outcome.stderr
        return directory, result


def _using(name: str, *recovery: str, result: object) -> Scenario:
    return Scenario(name, (), [recovery], result)  # type: ignore[arg-type]


_TRAIN = ("train", "--config", "{base}/tiny.yaml", "runner.output_dir={dir}")
_ON_SET = (*FINE_TUNE, "sft.data_dir={dir}/set")
DAMAGED = {
    damaged.name: damaged
    for damaged in (
        Damaged("interrupted run", (), _using("resume", "resume", "{dir}", result=run_result), start="interrupted"),
        Damaged("finished run", [_TRAIN], _using("resume", "resume", "{dir}", result=run_result)),
        Damaged(
            "policy",
            [("export", "{base}/interrupted", "{dir}/policy")],
            _using("eval", "eval", "{dir}/policy", *EVALUATE[1:], result=evaluated),
        ),
        Damaged("dataset", [COLLECT], _using("sft", *_ON_SET, result=trained_on)),
        Damaged("dataset lerobot", [(*COLLECT, "collect.format=lerobot")], _using("sft", *_ON_SET, result=trained_on)),
    )
}


def damaged_trees(tree: Tree) -> Iterator[tuple[str, str, Tree]]:
    """Yield what was done, to which file, and all files after it."""
    for path, content in tree.items():
        if isinstance(content, bytes) and content and not path.startswith(NOT_READ):
            for what, changed in changes(path, content):
                yield f"{path}: {what}", path, {**tree, path: changed}


def changes(path: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield versions of a file with one thing changed each."""
    places = {"head": 0, "byte 9": 9, "middle": len(content) // 2, "end": len(content) - 2}
    for name, at in places.items():
        if 0 <= at < len(content):
            yield f"a bit flipped at the {name}", _with(content, at, bytes([content[at] ^ 4]))
    yield "cut to half", content[: len(content) // 2]
    yield "empty", b""
    yield "zeros", bytes(len(content))
    if path.endswith(_JSON):
        found = list(_VALUE.finditer(content)) if not path.endswith(".yaml") else list(_yaml_values(content))
        step = max(1, -(-len(found) // _MOST_FIELDS))
        for match in found[::step]:
            new = _other(match[1])
            yield (
                f"{match[1].decode()[:20]} at byte {match.start(1)} is {new.decode()[:20]}",
                (content[: match.start(1)] + new + content[match.end(1) :]),
            )


def _yaml_values(content: bytes) -> Iterator[re.Match[bytes]]:
    return re.finditer(rb"(?m)(?<=: )(-?[\w.+-]+)$", content)


def _other(value: bytes) -> bytes:
    """Another value of the same type."""
    if value in (b"true", b"false"):
        return b"false" if value == b"true" else b"true"
    if value == b"null":
        return b"1"
    if value[:1] == b'"':
        text = value[1:].decode()  # with the last quotation mark
        kept = text if text[0] in '"\\' else text[1:]
        return f'"{"y" if text[0] == "x" else "x"}{kept}'.encode()
    try:
        number = json.loads(value)
    except ValueError:
        return value + b"x"
    return json.dumps(number + 1 if isinstance(number, int) else number * 1.5 + 1e-3).encode()


def _with(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]
