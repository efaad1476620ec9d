"""Settings that run code are taken from the user, not from a run of somebody else."""

from __future__ import annotations

import ast
import shutil
import sys
from pathlib import Path

import pytest
from expect import raises_code
from typer.testing import CliRunner

import embodrl
from embodrl.cli.main import app
from embodrl.config import load_config, load_run
from embodrl.config.nodes import Origin, from_plain
from embodrl.config.trust import CODE_SETTINGS, code_settings
from embodrl.trainer.settings import write_settings

MODULE = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').write_text('')\ndef fn(episode): return 0.0\n"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that leaves a trace when it is imported, on the search path; and a secret of this user's own."""
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "hostile_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "search"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("EMBODRL_TRUST", raising=False)
    return tmp_path / "search" / "hostile_code.ran"


SETTINGS = ["extensions=[hostile_code]", "reward.fn='hostile_code:fn'", "algorithm.adv_type='hostile_code:fn'"]
SETTINGS += ["pipeline.fn='hostile_code:fn'", "rollout.workflow='hostile_code:Flow'", "env.python=/tmp/program"]
SETTINGS += ["algorithm.loss_type='hostile_code:fn'", "cluster.ray_address='10.0.0.1:6379'"]


def write_run(directory: Path, setting: str) -> Path:
    """A run as somebody else would send it."""
    directory.mkdir(parents=True)
    tree = load_config(["env=toy"]).config.model_dump(mode="json")
    key, _, value = setting.partition("=")
    section, _, name = key.rpartition(".")
    place = tree
    for part in filter(None, section.split(".")):
        place = place[part]
    place[name] = [value.strip("[]")] if value.startswith("[") else value.strip("'")
    import yaml

    write_settings(directory, yaml.safe_dump(tree, sort_keys=False), [])
    return directory / "config.yaml"


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_of_somebody_else_runs_nothing(setting: str, hostile: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", setting)
    shutil.rmtree(tmp_path / "state")  # the secret of another user
    for load in (lambda: load_run(path), lambda: load_config([], path), lambda: load_config([], path.parent)):
        with raises_code("settings-run-code") as caught:
            load()
        assert setting.partition("=")[0] in str(caught.value) and "--trust" in str(caught.value)
    assert not hostile.exists()


def test_a_run_that_holds_nothing_but_settings_without_a_checksum_is_not_trusted(hostile: Path, tmp_path: Path) -> None:
    """As an archive may bring it: no metrics, no checkpoints, no lines that embodrl has added."""
    path = write_run(tmp_path / "run", "extensions=[hostile_code]")
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("#")))
    for load in (lambda: load_run(path), lambda: load_config([], path.parent)):
        with raises_code("settings-run-code"):
            load()
    (path.parent / "policy").mkdir()
    with raises_code("settings-run-code"):
        load_config([], path)
    assert not hostile.exists()


def test_copying_another_approval_does_not_help(hostile: Path, tmp_path: Path) -> None:
    mine = write_run(tmp_path / "mine", "reward.fn='embodrl.names:nearest'").read_text()
    (line,) = (line for line in mine.splitlines() if line.startswith("# approval"))
    path = write_run(tmp_path / "run", "reward.fn='hostile_code:fn'")
    kept = [text for text in path.read_text().splitlines() if not text.startswith("# approval")]
    path.write_text("\n".join([*kept, line]))
    with raises_code("settings-run-code"):
        load_run(path)
    assert not hostile.exists()


def test_runs_of_this_user_the_command_line_and_own_files_are_trusted(hostile: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", "extensions=[hostile_code]")
    assert load_run(path).config.extensions == ("hostile_code",)
    moved = tmp_path / "moved"
    shutil.move(path.parent, moved)
    assert load_run(moved / "config.yaml").config.extensions == ("hostile_code",)
    assert hostile.exists() and (tmp_path / "state/embodrl/trust.key").stat().st_mode & 0o777 == 0o600
    shutil.rmtree(tmp_path / "state")
    with raises_code("settings-run-code"):
        load_run(moved / "config.yaml")
    assert load_run(moved / "config.yaml", trust=True).config.extensions == ("hostile_code",)
    assert load_run(moved / "config.yaml", ["extensions=[hostile_code]"]).config.extensions == ("hostile_code",)
    (tmp_path / "own.yaml").write_text("presets: {env: toy}\nextensions: [hostile_code]\n")
    assert load_config([], tmp_path / "own.yaml").config.extensions == ("hostile_code",)


def test_a_file_that_all_users_can_write_is_not_trusted(hostile: Path, tmp_path: Path) -> None:
    path = tmp_path / "shared.yaml"
    path.write_text("presets: {env: toy}\nextensions: [hostile_code]\n")
    path.chmod(0o666)
    with raises_code("settings-run-code"):
        load_config([], path)
    assert not hostile.exists()
    path.chmod(0o664)  # as files are where every user has a group
    assert load_config([], path).config.extensions == ("hostile_code",)


def test_the_environment_may_trust_all(hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "run", "extensions=[hostile_code]")
    shutil.rmtree(tmp_path / "state")
    monkeypatch.setenv("EMBODRL_TRUST", "1")
    assert load_run(path).config.extensions == ("hostile_code",)


@pytest.mark.parametrize(
    "command",
    [
        "sft -c RUN no=1",
        "collect -c RUN no=1",
        "plan train -c RUN",
        "pipeline show -c RUN",
        "config diff RUN",
        "list -c RUN",
    ],
)
def test_every_verb_that_reads_a_run_has_the_option(command: str, hostile: Path, tmp_path: Path) -> None:
    """``no=1`` is not a setting: it ends the verbs that would start something, after extensions have been imported."""
    path = write_run(tmp_path / "run", "extensions=[hostile_code]")
    shutil.rmtree(tmp_path / "state")
    arguments = command.replace("RUN", str(path.parent)).split()
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2 and "settings-run-code" in refused.stderr and not hostile.exists()
    sys.modules.pop("hostile_code", None)
    trusted = CliRunner().invoke(app, [*arguments, "--trust"])
    assert hostile.exists() and "settings-run-code" not in trusted.stderr


def test_a_reference_is_taken_for_code() -> None:
    tree = from_plain(
        {"reward": {"fn": "${runner.name}"}, "env": {"id": "Reacher-v5", "python": "auto"}}, Origin("run")
    )
    assert code_settings(tree) == {"reward.fn": "${runner.name}"}


@pytest.mark.parametrize("key", [key for key in CODE_SETTINGS if key.startswith("env.")])
def test_settings_of_evaluations_are_code_like_those_of_training(key: str) -> None:
    name = key.removeprefix("env.")
    tree = from_plain({"env": {"eval": {"settings": {name: "hostile_code:Env"}}}}, Origin("run"))
    assert code_settings(tree) == {f"env.eval.settings.{name}": "hostile_code:Env"}


def test_estimators_of_tasks_are_code_if_they_are_functions() -> None:
    for entries, runs in (
        ([{"task": "a:b", "adv_type": "grpo"}, {"task": "c"}], False),
        ([{"task": "a"}, {"task": "c", "adv_type": "hostile_code:fn"}], True),
        (["${runner.name}"], True),
        ("${runner.name}", True),
    ):
        tree = from_plain({"algorithm": {"by_task": entries}}, Origin("run"))
        assert code_settings(tree) == ({"algorithm.by_task": entries} if runs else {})


# Where the package imports a module by name, starts a program or joins a cluster, and the setting that names it; ""
# where no setting does: the name stands in embodrl itself, or comes with a process's start message.
SITES = {
    "api.py": "",
    "__init__.py": "",
    "cli/resume.py": "",
    "config/__init__.py": "",
    "config/isolated.py": "env.python",
    "config/load.py": "extensions",
    "config/rules/__init__.py": "",  # rules of a verb, which its spec names
    "config/schema/optional.py": "",
    "config/schema/settings_class.py": "",
    "data/lerobot.py": "",
    "data/video_file.py": "",
    "envs/gymnasium/env.py": "env.id",
    "envs/pool/worker_main.py": "extensions",
    "hybrid_engines/training/megatron/core.py": "",
    "hybrid_engines/training/policy_engine.py": "",
    "hybrid_engines/training/remote.py": "",
    "envs/robot/env.py": "env.robot env.robot_module env.reset_fn env.success_fn",
    "models/remote_policy/spec.py": "",
    "hybrid_engines/rollout/native.py": "",
    "tools/parity/cli.py": "",
    "tools/recipe/stages.py": "recipe.collect recipe.rl recipe.sft recipe.teacher",
    "tools/sweep/ray_task.py": "",
    "tools/sweep/runs.py": "",
    "names.py": "actor.optim.fn reward.fn rollout.agent rollout.workflow pipeline.fn"
    " algorithm.off_policy.intervention_device",
    "tools/doctor/extras.py": "",
    "preflight/isolated.py": "",
    "preflight/run_memory.py": "",
    "preflight/simulators.py": "env.python",
    "preflight/vulkan.py": "",
    "processes/bootstrap.py": "",
    "processes/child.py": "env.python model.python",
    "processes/guard.py": "",
    "registry.py": "algorithm.adv_type algorithm.by_task algorithm.loss_type algorithm.srpo.encoder",
    "trainer/parts.py": "",
    "trainer/provenance.py": "",
    "scheduler/launchers/host.py": "",
    "scheduler/launchers/ray/launcher.py": "cluster.ray_address",
    "serving/wire/codec.py": "",
    "scheduler/messages.py": "extensions",
    "specs.py": "",
    "session.py": "",  # looks for the function that the script gives
    "workers/actor.py": "",
    "workers/rollout_backend.py": "",
    "workers/workflows/mcp_tools.py": "",
}
CALLS = {"import_object", "import_module", "__import__", "Popen", "run_path", "run_module", "exec", "eval", "system"}
CALLS |= {"create_subprocess_exec", "create_subprocess_shell", "execv", "execve", "spawnv"}


def runs_what_a_value_names(call: ast.Call) -> bool:
    """Return whether a call imports or starts what is not written out in the program."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = getattr(getattr(call.func, "value", None), "id", "")
    torch_method = name == "eval" and isinstance(call.func, ast.Attribute)
    literal = bool(call.args) and isinstance(call.args[0], ast.Constant)
    return not literal and ((name in CALLS and not torch_method) or (owner == "subprocess" and name == "run"))


def test_the_list_is_complete() -> None:
    """A new place that imports or starts something has to be entered above, with the setting that names it."""
    package = Path(embodrl.__file__).parent
    calls = ((path, node) for path in package.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    found = {
        path.relative_to(package).as_posix()
        for path, node in calls
        if isinstance(node, ast.Call) and runs_what_a_value_names(node)
    }
    assert found <= SITES.keys(), sorted(found - SITES.keys())
    assert {key for keys in SITES.values() for key in keys.split()} == CODE_SETTINGS.keys()


def test_the_list_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    assert all(f"`{key}`" in text for key in CODE_SETTINGS)
