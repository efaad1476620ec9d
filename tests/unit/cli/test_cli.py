"""The command line: help, completion, misspelt words, and differences between configurations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from expect import raises_code
from shared_file import as_file
from typer.testing import CliRunner, Result

from embodrl.cli.app import complete_settings, summary
from embodrl.cli.common import describe_os_error, execute
from embodrl.cli.main import app
from embodrl.config import load_config
from embodrl.errors import EmbodrlError
from embodrl.runs import policies
from embodrl.specs import VERBS as REGISTERED


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="embodrl")


VERBS = ["train", "eval", "collect", "convert", "sft", "resume", "export", "list", "doctor", "parity"]
VERBS += ["plan train", "config show", "config validate", "config diff", "env install", "env list", "env remove"]
VERBS += ["pipeline show", "model random", "env serve"]


@pytest.mark.parametrize("verb", ["", "plan", "config", "env", "pipeline", *VERBS])
def test_help_has_a_short_option_and_nothing_is_cut(verb: str) -> None:
    short, long = run(*verb.split(), "-h"), run(*verb.split(), "--help")
    assert short.exit_code == long.exit_code == 0
    assert short.stdout == long.stdout
    usage, *lines = short.stdout.splitlines()
    assert not [line for line in lines if line.endswith("...")], "descriptions are whole"
    assert not set("{}<>") & set(usage.replace("[", "").replace("]", ""))


def test_exit_codes_are_listed_whole() -> None:
    text = run("--help").stdout
    assert all(f"\n    {code} " in text for code in (0, 1, 2, 129, 130, 143))


@pytest.mark.parametrize(
    ("words", "position", "expected"),
    [
        ("embodrl train env = maniskill_pu", 4, ["maniskill_pull", "maniskill_pull_tool", "maniskill_push"]),
        ("embodrl train env =", 3, ["libero_spatial", "toy"]),
        ("embodrl train actor.optim.l", 2, ["actor.optim.lr="]),
        ("embodrl train mod", 2, ["model=", "model.warm_start="]),
        ("embodrl train rollout.backend = v", 4, ["vllm"]),
        ("embodrl list en", 2, ["envs"]),
        ("embodrl conf", 1, ["config"]),
    ],
)
def test_bash_completes_presets_and_keys(words: str, position: int, expected: list[str]) -> None:
    environ = {"_EMBODRL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)}
    outcome = CliRunner().invoke(app, [], prog_name="embodrl", env=environ)
    assert set(expected) <= set(outcome.stdout.split()), outcome.stdout


def test_completion_in_shells_that_do_not_split_words() -> None:
    context = typer.Context(typer.main.get_command(app))  # pyright: ignore[reportArgumentType]
    assert [word for word, _ in complete_settings(context, "env=to")] == ["env=toy"]
    assert [word for word, _ in complete_settings(context, "env.video.enabled=")] == [
        f"env.video.enabled={value}" for value in ("true", "false")
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["list", "things"], "unknown kind 'things'; available: models, envs"),
        (["list", "env"], "did you mean 'envs'?"),
        (["convert", "droid", "x", "-o", "y"], "unknown layout 'droid'; available: libero"),
        (["trian"], "did you mean `embodrl train`?"),
        (["help"], "write `embodrl --help`"),
        (["validate"], "write `embodrl config validate`"),
        (["vaildate"], "did you mean `embodrl config validate`?"),
        (["check"], "write `embodrl data check` or `embodrl model check` or "),
        (["rlds"], "write `embodrl convert rlds`"),
        (["presets"], "write `embodrl list presets`"),
        (["config", "train"], "write `embodrl train` or `embodrl plan train` or "),
        (["token"], "write `embodrl model token`"),
        (["outputs"], "`embodrl --help` lists all commands"),
        (["list", "algorithm_things"], "choose one of models, envs"),
    ],
)
def test_words_that_are_none_name_the_nearest(arguments: list[str], expected: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert expected in result.stderr and "code: " in result.stderr and "Value error" not in result.stderr


def test_notes_look_like_problems() -> None:
    result = run("config", "validate", "env=toy", "runner.max_iterations=1", "actor.optim.lr_warmup_iterations=0")
    assert result.exit_code == 0
    note = result.stderr.split("note: ")[1].splitlines()
    assert note[0].startswith("actor.optim.critic_warmup_iterations: ")
    assert [line.split(":")[0].strip() for line in note[1:]] and note[-1].startswith("     code:     ")
    assert any(line.startswith("     at:       ") for line in note)


def test_what_differs_between_two_configurations(tmp_path: Path) -> None:
    result = run("config", "diff", "env=toy", "env=toy runner.seed=3 'env.tasks=[reach-green,reach-red]'")
    assert result.exit_code == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows] == ["key", "env.tasks", "runner.seed"]
    assert rows[1][1:] == ["[reach-red]", "[reach-green,", "reach-red]"] and rows[2][1:] == ["0", "3"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(load_config(["env=toy", "algorithm.gamma=0.5"]).to_yaml())
    (tmp_path / "mine.yaml").write_text("presets: {env: toy}\n")
    result = run("config", "diff", str(tmp_path / "mine.yaml"), str(tmp_path / "run"))
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["key", "algorithm.gamma"]
    assert run("config", "diff", "env=toy", "env=toy").stdout == "no differences\n"
    missing = run("config", "diff", str(tmp_path / "nothing"), "env=toy")
    assert missing.exit_code == 2 and "code: config-diff-side" in missing.stderr


def test_a_run_can_be_given_as_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(load_config(["env=toy", "algorithm.gamma=0.5"]).to_yaml())
    result = run("config", "show", "--config", str(tmp_path), "--plain")
    assert result.exit_code == 0 and "gamma: 0.5" in result.stdout


def test_a_policy_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        result = run("eval", str(path))
        assert result.exit_code == 2 and "code: policy-not-found" in result.stderr
        assert "RUN/checkpoints/step_N" in result.stderr


def test_the_policy_of_a_run_is_offered_for_a_warm_start(tmp_path: Path) -> None:
    (tmp_path / "run" / "policy").mkdir(parents=True)
    (tmp_path / "run" / "policy" / "config.json").write_text("{}")
    (tmp_path / "run" / "config.yaml").write_text("{}")
    result = run("config", "validate", f"model.warm_start={tmp_path}/run")
    assert result.exit_code == 2 and f"write model.warm_start={tmp_path}/run/policy" in result.stderr
    (tmp_path / "run" / "checkpoints" / "step_2").mkdir(parents=True)
    result = run("config", "validate", f"model.warm_start={tmp_path}/run/checkpoints/step_2")
    assert result.exit_code == 2 and f"embodrl export {tmp_path}/run/checkpoints/step_2" in result.stderr


def test_resume_names_the_run_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step_2").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("{}")
    for verb in (["resume"], ["export"]):
        place = tmp_path / "run" / "policy" if verb == ["export"] else tmp_path / "run" / "checkpoints" / "step_2"
        result = run(*verb, str(place), *([str(tmp_path / "out")] if verb == ["export"] else []))
        assert result.exit_code == 2 and "code: not-a-run" in result.stderr
        assert f"embodrl resume {tmp_path}/run" in result.stderr


def test_an_output_directory_without_a_file_is_removed_when_the_work_fails(tmp_path: Path) -> None:
    from embodrl.trainer.files import removed_if_empty

    for name, files in (("empty", 0), ("full", 1)):
        (tmp_path / name / "videos").mkdir(parents=True)
        for number in range(files):
            (tmp_path / name / f"{number}.txt").write_text("mine")
        with pytest.raises(KeyboardInterrupt), removed_if_empty(tmp_path / name):
            raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize(
    "limit_kib",
    [150_000, 600_000, *(pytest.param(kib, marks=pytest.mark.long) for kib in (300_000, 450_000, 1_500_000))],
)
def test_a_limit_of_the_shell_on_memory_is_named(limit_kib: int, tmp_path: Path) -> None:
    code = "from embodrl.cli.main import main; main()"
    arguments = ["train", "env=toy", "model.warm_start=null", f"runner.output_dir={tmp_path / 'run'}"]
    command = ["bash", "-c", f'ulimit -v {limit_kib}; exec "$0" "$@"', sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "code: memory-limit" in done.stderr and "ulimit -v unlimited" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "refused before the work"


def test_a_limit_of_the_shell_on_files_is_named(tmp_path: Path) -> None:
    """As `ulimit -f`: Python ignores SIGXFSZ, and writing fails with EFBIG."""
    code = "from pathlib import Path; from embodrl.storage.json_file import write_json_file; import sys\n"
    code += "from embodrl.cli.common import execute\n"
    code += "execute(lambda: write_json_file(Path(sys.argv[1]), ['x' * 100] * 5000))"
    command = ["bash", "-c", 'ulimit -f 100; exec "$0" "$@"', sys.executable, "-c", code, str(tmp_path / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "ulimit -f unlimited" in done.stderr and "code: output" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_command_within_another_process_does_not_take_it_over() -> None:
    from embodrl.processes.ending import owns_process

    CliRunner().invoke(app, ["config", "validate", "env=toy"])
    assert not owns_process()


def test_an_evaluation_with_a_place_of_its_own_does_not_want_to_write_to_the_run(monkeypatch, tmp_path) -> None:
    source = Mock()
    source.load_config.side_effect = EmbodrlError("enough", "", code="enough")
    monkeypatch.setattr(policies, "find_policy", lambda path: source)
    run("eval", "somewhere", "-o", str(tmp_path / "eval"))
    assert source.load_config.call_args.args[0] == [f"runner.output_dir='{tmp_path}/eval'"]


def test_serving_wants_no_place_to_write_to(tmp_path) -> None:
    (tmp_path / "file").touch()
    settings = ["env=toy", f"runner.output_dir={tmp_path}/file"]
    load_config([], as_file(settings), verb="serve")
    with raises_code("outputs-can-be-written"):
        load_config(settings, verb="eval")


def test_a_working_directory_that_was_removed_is_named(monkeypatch) -> None:
    error = FileNotFoundError(2, "No such file or directory")
    assert "working directory" not in describe_os_error(error).message
    monkeypatch.setattr(os, "getcwd", Mock(side_effect=error))
    assert "working directory" in describe_os_error(error).message


def test_a_crash_of_native_code_shows_its_stack_and_a_terminal_without_size_something() -> None:
    code = "import ctypes, os, embodrl.cli.main as m\n"
    code += "def crash(**_): print(os.environ.get('COLUMNS'), flush=True); ctypes.string_at(0)\nm.app = crash\nm.main()"
    environ = {**os.environ, "COLUMNS": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == -11 and "in crash" in done.stderr and done.stdout == "None\n"


def test_errors_send_no_escape_sequences_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        execute(Mock(side_effect=EmbodrlError("a simulator said \x1b[2J")))
    assert "said \\x1b[2J" in capsys.readouterr().err


def test_a_missing_run_has_one_exit_code(tmp_path: Path) -> None:
    for verb in ("resume", "eval"):
        assert run(verb, str(tmp_path / "nothing")).exit_code == 2


@pytest.mark.parametrize("verb", [("compare",), ("watch",), ("data", "check")])
def test_a_missing_path_has_the_same_exit_code_in_every_verb(verb: tuple[str, ...], tmp_path: Path) -> None:
    assert run(*verb, str(tmp_path / "nothing")).exit_code == 2


def test_an_option_of_another_system_is_answered_with_the_setting() -> None:
    result = run("train", "--lr", "3e-4")
    assert result.exit_code == 2
    assert "code: argument-option" in result.stderr and "actor.optim.lr=VALUE" in result.stderr
    for option, written in (
        ("--config-name", "--config FILE"),
        ("--policy.type", "model=NAME"),
        ("--episodes", "env.eval.num_episodes=VALUE"),
    ):
        result = run("train", option, "4")
        assert "code: argument-option" in result.stderr and written in result.stderr, option


def test_a_setting_in_place_of_a_command_is_answered_with_the_command() -> None:
    result = run("plan", "env=toy")
    assert result.exit_code == 2
    assert "code: command-unknown" in result.stderr and "plan train env=toy" in result.stderr
    assert "actor=fsdp cluster.placement=auto" in run("train", "--gpus", "2").stderr


@pytest.mark.parametrize(
    ("setting", "code"),
    [("cluster.device=cuda", "placement"), ("runner.output_dir=/proc/foo", "outputs-can-be-written")],
)
def test_validate_finds_what_this_machine_lacks(setting: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = run("config", "validate", "env=toy", "model.warm_start=null", setting)
    assert result.exit_code == 2 and f"code:     {code}" in result.stderr


def test_validate_finds_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embodrl.preflight.simulators.missing_packages", lambda *_: ["absent"])
    result = run("config", "validate", "env=toy", "model.warm_start=null")
    assert result.exit_code == 2 and "code:     missing-dependency" in result.stderr and "absent" in result.stderr


def test_help_names_the_verbs_without_importing_them() -> None:
    """Neither the schema nor a verb's own module: the list of commands is there at once."""
    code = (
        "import sys\n"
        "sys.argv = ['embodrl', '--help']\n"
        "from embodrl.cli.main import main\n"
        "try:\n    main()\n"
        "finally:\n    print('LOADED', *sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    loaded = done.stdout.partition("LOADED")[2].split()
    heavy = {"pydantic", "yaml", "omegaconf", "hydra", "numpy", "rich", "torch"}
    assert not heavy & {name.partition(".")[0] for name in loaded}
    targets = {str(REGISTERED.entry(name).target).partition(":")[0] for name in REGISTERED.builtin}
    assert targets and not targets & set(loaded)
    assert not [name for name in loaded if name.startswith("embodrl.config.")]


@pytest.mark.parametrize("name", REGISTERED.builtin)
def test_the_list_of_commands_shows_the_first_line_of_each_help(name: str) -> None:
    target: Any = REGISTERED.get(name)
    if isinstance(target, typer.Typer):
        assert target.registered_callback is not None
        target = target.registered_callback.callback
    assert REGISTERED.entry(name).description == summary(target)


def test_a_broken_verb_of_another_package_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[embodrl.verbs]\nbroken_verb = broken_verbs:SPEC\n")
    (tmp_path / "broken_verbs.py").write_text(
        "from embodrl.specs import VerbSpec\n"
        "SECTIONS = {'broken': 'broken_target:Section'}\n"
        "SPEC = VerbSpec(name='broken_verb', target='broken_target:run', sections=SECTIONS)\n"
    )
    (tmp_path / "broken_target.py").write_text("raise RuntimeError('half installed')\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for arguments, code in ((["--help"], 0), (["config", "validate", "env=toy", "runner.sed=1"], 2)):
        command = [sys.executable, "-m", "embodrl", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


def test_other_packages_can_end_no_verb_but_their_own(tmp_path: Path) -> None:
    """One leaves the process when it is imported, one raises no Exception, and the list of one is damaged."""
    bodies = {"leaves": "import os; os._exit(3)", "exits": "raise SystemExit(3)", "bare": "raise BaseException('no')"}
    points = "".join(f"{name} = {name}_verbs:SPEC\n" for name in bodies)
    losses = "[embodrl.losses]\nexits = exits_verbs:LOSS\n"
    for package, text in {
        "somebody": f"[embodrl.verbs]\n{points}{losses}",
        "damaged": "[embodrl.verbs]\nword\n",
    }.items():
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(text)
    for name, body in bodies.items():
        (tmp_path / f"{name}_verbs.py").write_text(f"{body}\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def ends(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "embodrl", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    code, out, err = ends("--help")
    assert code == 0 and all(name in out for name in bodies) and "Of the package somebody" in out
    assert "damaged" in err and err.count("can't be read") == 1
    assert ends("list", "algorithms")[0] == 0
    code, _, err = ends("exits")
    assert code == 1 and "'exits' can't be used" in err
    (tmp_path / "leaves_verbs.py").write_text("raise SystemExit(3)\n")  # a run is resumed by any verb
    assert ends("resume", str(tmp_path / "none"))[0] == 2
