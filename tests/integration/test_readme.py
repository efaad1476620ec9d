"""The code of README.md runs as it is written, at the smallest size.

Each command of its shell blocks is executed. What makes it small is in two tables: ``STANDS_FOR`` replaces words that
the reader's machine has and a test has not, and ``SMALL`` appends settings, by verb. Targets of make, which set up an
environment first, are looked up in the Makefile.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import documented
import pytest
from documented import Command
from runs import Outcome, embodrl, script

README = Path(__file__).parents[2] / "README.md"
TINY = [
    *("env.max_episode_steps=4", "env.cameras=[{height: 16, width: 16}]", "env.pin_cpus=false", "env.num_processes=1"),
    *("env.eval.num_episodes=4", "model.num_action_chunks=1"),
]
TRAINED = [
    *("env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=4", "actor.global_batch_size=4"),
    *("actor.micro_batch_size=4", "runner.output_dir=DIRECTORY"),
]
SCRIPT = """
import embodrl

train = embodrl.train
embodrl.train = lambda arguments: train([*arguments, *SMALL])
"""
COMMANDS = {" ".join(command.arguments): command for command in documented.commands(README)}
STANDS_FOR = {"env=maniskill": "env=toy", "outputs/my-run": "DIRECTORY"}
"""Words of the page -> what they stand for here; DIRECTORY is the run that the page's first command has made."""
SMALL = {
    "train": [*TINY, *TRAINED, "model.warm_start=null", "runner.max_iterations=1"],
    "resume": ["runner.max_iterations=2"],
    "eval": [*TINY, "model.warm_start=null", "model.random_weights=true"],
}
"""Verb -> settings that are appended."""
STATUS = {"config validate algorithm.gamma=2": 2}
"""Commands that show an error -> their exit status."""
SHOWN = {
    "train": "report.html",
    "resume": "report.html",
    "eval": "success rate",
    "config": "config-range",
    "plan": "fit",
    "doctor": "embodrl",
}
"""Verb -> a word of what it prints."""
LONG = ("doctor",)
"""Verbs that take more than ten seconds."""


@pytest.fixture(scope="module")
def run_it(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Command], Outcome]:
    """Run a command of the page; what needs a run gets that of the first command that trains."""
    directory = str(tmp_path_factory.mktemp("readme") / "run")

    def execute(command: Command) -> Outcome:
        words = [*(STANDS_FOR.get(word, word) for word in command.arguments), *SMALL.get(command.arguments[0], [])]
        return embodrl(*(word.replace("DIRECTORY", directory) for word in words))

    first = next(command for command in COMMANDS.values() if command.arguments[0] == "train")

    @functools.cache
    def trained() -> Outcome:
        return execute(first)

    def run_one(command: Command) -> Outcome:
        if any(STANDS_FOR.get(word) == "DIRECTORY" for word in command.arguments):
            trained()
        return trained() if command is first else execute(command)

    return run_one


@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=[pytest.mark.long] if text.split()[0] in LONG else []) for text in COMMANDS]
)
def test_the_commands_of_the_readme_run(text: str, run_it: Callable[[Command], Outcome]) -> None:
    outcome = run_it(COMMANDS[text])
    assert outcome.code == STATUS.get(text, 0), outcome.stderr
    assert SHOWN[text.split()[0]] in outcome.stdout + outcome.stderr


def test_every_line_of_the_shell_blocks_is_checked() -> None:
    page = README.read_text(encoding="utf-8")
    lines = "".join(re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)).splitlines()
    words = [line.partition("#")[0].split() for line in lines]
    made = [rest for name, *rest in words if name == "make"]
    targets = set(re.findall(r"^([\w-]+):", (README.parent / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert made and {target for targets_of in made for target in targets_of} <= targets
    assert len(made) + len(COMMANDS) == len(words)


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    small = [word.replace("DIRECTORY", str(tmp_path / "run")) for word in (*TINY, *TRAINED)]
    lines = (SCRIPT.replace("SMALL", repr(small)) + block).splitlines()
    path = tmp_path / "readme.py"
    # Simulators start by importing the main module, so that its work stands behind a condition.
    path.write_text("if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in lines))
    outcome = script(path)
    assert re.search(r"\d+%, report: .*\.html$", outcome.stdout.strip()), outcome.stdout
