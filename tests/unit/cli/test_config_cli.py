"""The command line as a user runs it: reports, exit codes, time, and what is never imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from embodrl.cli.main import app
from embodrl.config import load_config, load_resolved

WRONG = ["env=maniskil", "runner.sed=3", "actor.global_batch_size=160", "actor.micro_batch_size=50"]


def invoke(*arguments: str) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(app, list(arguments), prog_name="embodrl")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m embodrl` with these arguments, as a user does."""
    command = [sys.executable, "-m", "embodrl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_valid_configuration() -> None:
    sizes = ["env.train.total_num_envs=32", "env.train.max_steps_per_rollout_epoch=100", "model.num_action_chunks=5"]
    sizes += ["env.max_episode_steps=50", "actor.global_batch_size=160", "actor.micro_batch_size=80"]
    result = run("config", "validate", "env=maniskill", "model=openvla", *sizes)
    assert (result.returncode, result.stderr) == (0, "")
    assert "640 chunks, 3200 environment steps" in result.stdout


def test_wrong_configuration() -> None:
    result = run("config", "validate", *WRONG)
    assert (result.returncode, result.stdout) == (2, "")
    assert "The configuration has 3 problems" in result.stderr
    assert "nearest:  runner.seed" in result.stderr
    assert "at:       command line: env=maniskil" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("verb", ["train", "eval", "collect", "sft"])
def test_every_verb_refuses_a_wrong_configuration(verb: str, tmp_path: Path) -> None:
    result = invoke(verb, "runner.sed=3", f"runner.output_dir={tmp_path}/run")
    assert result.exit_code == 2
    assert "nearest:  runner.seed" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_validation_imports_nothing_that_takes_seconds() -> None:
    program = (
        "import sys\n"
        "from embodrl.cli.main import main\n"
        f"sys.argv = ['embodrl', 'config', 'validate', *{WRONG!r}]\n"
        "try:\n    main()\nexcept SystemExit as leave:\n    code = leave.code\n"
        "heavy = {'torch', 'transformers', 'mani_skill', 'sapien', 'gymnasium', 'numpy', 'wandb'} & set(sys.modules)\n"
        "print(code, sorted(heavy))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.strip() == "2 []"


def test_show_is_yaml_with_origins(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("env:\n  train: {seed: 11}\n")
    result = invoke("config", "show", "--config", str(path), "runner.seed=3")
    assert result.exit_code == 0
    lines = {line.split("#")[0].strip(): line.split("# ")[-1] for line in result.stdout.splitlines()}
    assert lines["seed: 3"] == "command line: runner.seed=3"
    assert lines["seed: 11"] == f"{path}:2"
    assert lines["keep_last_n: 2"] == "schema default"
    shown = tmp_path / "shown.yaml"
    shown.write_text(result.stdout)
    assert load_resolved(shown) == load_config(["runner.seed=3"], path).config


def test_show_to_a_reader_that_leaves_early() -> None:
    command = f"'{sys.executable}' -m embodrl config show | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.stderr) == ("env:\n", "")


def test_list() -> None:
    result = invoke("list")
    assert result.exit_code == 0
    for name in ("openvla", "maniskill", "LiftPegUpright-v1", "adv_type=gae", "env=maniskill_mix", "runner=debug"):
        assert name in result.stdout


@pytest.mark.parametrize("arguments", [("nonsense",), ("train", "--nonsense"), ("list", "nonsense"), ("resume",)])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "-h' for help" in result.stderr or "code: argument-choice" in result.stderr


@pytest.mark.parametrize(
    "verb",
    [
        "train",
        "eval",
        "collect",
        "sft",
        "resume",
        "config",
        "config show",
        "config validate",
        "list",
        "doctor",
    ],
)
def test_help_has_examples(verb: str) -> None:
    result = invoke(*verb.split(), "--help")
    assert result.exit_code == 0
    assert f"  embodrl {verb}" in result.stdout.split("Example", 1)[1]


@pytest.mark.parametrize(
    ("outcome", "code", "says"),
    [
        (None, 0, ""),
        (3, 3, ""),
        ("EmbodrlError", 1, "error: it broke\n  hint: fix it"),
        ("ConfigError", 2, "The configuration has 1 problem"),
        ("KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_exit_codes(outcome: object, code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    import signal

    import typer

    from embodrl.cli.common import execute
    from embodrl.errors import ConfigError, ConfigProblem, EmbodrlError

    errors = {
        "EmbodrlError": EmbodrlError("it broke", "fix it"),
        "ConfigError": ConfigError([ConfigProblem("a.b", "is wrong")]),
        "KeyboardInterrupt": KeyboardInterrupt(),
    }

    def action() -> int | None:
        if isinstance(outcome, str):
            raise errors[outcome]
        return outcome  # type: ignore[return-value]

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(typer.Exit) as caught:
            execute(action)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.exit_code == code
    assert says in capsys.readouterr().err


def test_sigterm_ends_a_process_whose_import_swallows_exceptions(tmp_path: Path) -> None:
    body = "try:\n    print('ready', flush=True)\n    signal.pause()\nexcept BaseException:\n    pass\nprint('after')\n"
    (tmp_path / "swallows.py").write_text(f"import signal\n{body}")
    program = (
        "from embodrl.cli.common import execute\n"
        "def action():\n"
        f"    sys.path.insert(0, {str(tmp_path)!r})\n"
        "    import swallows\n"
        "import sys\n"
        "execute(action)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == 143


def test_sigterm_runs_finally_clauses(tmp_path: Path) -> None:
    program = (
        "import pathlib, signal\n"
        "from embodrl.cli.common import execute\n"
        "def action():\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        signal.pause()\n"
        "    finally:\n"
        f"        pathlib.Path({str(tmp_path / 'closed')!r}).touch()\n"
        "execute(action)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert (tmp_path / "closed").exists()
