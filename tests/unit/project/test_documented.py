"""Every `embodrl` command in README.md and docs/ is accepted: its arguments parse, its settings are valid.

Nothing is started. What a machine lacks (GPUs, Ray, an interpreter of a simulator) does not make a command wrong.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import documented
import pytest
import tutorial
import typer
from documented import Command
from fresh import forget_extensions
from typer.core import TyperGroup

from embodrl.cli.main import app
from embodrl.cli.serve import arguments_of
from embodrl.config import LoadedConfig
from embodrl.config.rules import shipped_rules
from embodrl.config.schema.readers import Verb
from embodrl.errors import ConfigError
from embodrl.pipelines.load import load_config
from embodrl.tools.recipe.stages import plan_recipe
from embodrl.tools.sweep.combinations import expand_sweep

COMMANDS = [command for page in documented.PAGES for command in documented.commands(page)]
VERBS: dict[tuple[str, ...], Verb | None] = {
    ("train",): "train",
    ("eval",): "eval",
    ("sft",): "sft",
    ("collect",): "collect",
    ("plan", "train"): "plan",
    ("serve",): "serve",
    **{("store", name): "store" for name in ("collect", "train", "eval", "status", "compact")},
    ("join",): "store",
    ("profile",): "train",
    ("model", "check"): "train",
    ("config", "validate"): None,
    ("config", "show"): None,
    ("pipeline", "show"): None,
    ("resume",): None,
}
"""Those with settings, and what is checked; the arguments of the others are parsed."""
STANDS_FOR = {
    "runner.output_dir=/shared/runs/first": "runner.output_dir=first",
    **{"MODE": "actor=native", "runner.seed=S": "runner.seed=1", "mine.yaml": "my_task/config.yaml"},
    **{
        f"{section}.python=lerobot-env/bin/python": f"{section}.python={sys.executable}" for section in ("env", "model")
    },
}
"""Words of the pages that the reader replaces."""
WRONG = {
    ("README.md", "algorithm.gamma=2"): "config-range",
    ("tutorial.md", "env.motor_gian=3"): "config-unknown-key",
}
"""Commands that show an error report: one of their words, and what is reported."""
POLICIES = ("model.warm_start", "model.model_path", "algorithm.teacher")
EXEMPT = {"my_module:MyWorkflow": "the reader's own module", "my_package:MyArm-v0": "the reader's own package"}
EIGHT_GPUS = [
    *("cluster.hardware.name=documented", "cluster.hardware.num_gpus=8", "cluster.hardware.gpu_memory_gib=80"),
    *("cluster.hardware.num_numa_nodes=2", "cluster.hardware.num_cores=96", "cluster.hardware.memory_gib=1024"),
]
PLANNED = ("actor:0-7,rollout:8-15", "actor:0-3,rollout:4-7")
"""Placements on machines with eight GPUs, which are described to the check."""
WITH_RUN = {"tutorial.md"}
"""Pages whose runs have the tutorial's environment; elsewhere a run has the default one."""


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_documented_commands_are_valid(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(word in argument for argument in command.arguments for word in EXEMPT):
        pytest.skip("names a module of the reader's")
    if any("examples/agent" in argument for argument in command.arguments):
        pytest.importorskip("openai", reason="the client of examples/agent is not installed")
    place(tmp_path, command, monkeypatch)
    monkeypatch.setattr("embodrl.config.load.fetch_facts", lambda tree, verb: ([], []))  # no network
    arguments = [STANDS_FOR.get(word, word) for word in command.arguments]
    path, rest = parse(arguments)
    if path == ("sweep",):
        runs = expand_sweep(rest["overrides"])
        assert [problems_of(list(run.overrides), None, "train") for run in runs] == [{}] * len(runs)
        return
    if path not in VERBS and path != ("run",):
        plain = path[0] in ("doctor", "data", "export", "list") or path == ("model", "token")
        assert "overrides" not in rest or plain
        return
    if path == ("run",):
        assert plan_recipe(rest["overrides"]).stages
        return
    given = [rest[name] for name in ("config",) if rest.get(name) is not None]
    overrides = [str(word) for word in rest["overrides"] or ()]
    if path == ("serve",):
        served, overrides = arguments_of(overrides)
        overrides = overrides if served is None else [str(served), *overrides]
    verb = VERBS[path]
    if path == ("collect",) and any(word.startswith("policy=") for word in overrides):  # an argument of its own
        overrides = [word for word in overrides if not word.startswith("policy=")]
        verb = "record"
    code = next((WRONG[key] for key in WRONG if key[0] == command.page and key[1] in command.arguments), None)
    if overrides and "=" not in overrides[0]:
        # A run, whose configuration the others change, and which has weights.
        overrides = [*overrides[1:], *(["model.random_weights=true"] if verb in ("eval", "serve") else [])]
        given = [Path("my_task/config.yaml")] if command.page in WITH_RUN else []
    if verb == "train" and any(places in word for places in PLANNED for word in overrides):
        overrides, verb = [*overrides, *EIGHT_GPUS], "plan"
    problems = problems_of(overrides, given[0] if given else None, verb)
    if code is None:
        assert problems == {}
    else:
        assert code in problems


def parse(arguments: list[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the verb of a command, and its parameters, as the command line would read them; none is run."""
    command = typer.main.get_command(app)
    context = command.make_context("embodrl", list(arguments))
    path: tuple[str, ...] = ()
    while isinstance(command, TyperGroup):
        # a group leaves the name of the verb aside, and what follows it in ``args``
        name, *rest = arguments[len(path) :]
        found = command.resolve_command(context, [name, *rest])[1]
        assert found is not None, f"there is no `embodrl {' '.join((*path, name))}`"
        command, path = found, (*path, name)
        context = command.make_context(name, rest, parent=context)
    return path, context.params


def problems_of(overrides: list[str], config_file: object, verb: Verb | None) -> dict[str, str]:
    """Return what is wrong with a configuration, by code, apart from what is wrong with this machine."""
    try:
        loaded = load_config(overrides, Path(str(config_file)) if config_file else None, verb)
    except ConfigError as error:
        return {each.code: f"{each.key}: {each.message}" for each in error.problems if each.code not in of_machines()}
    assert isinstance(loaded, LoadedConfig)
    return {}


def of_machines() -> set[str]:
    """Return the codes of rules about the machine, and of those about the programs on it."""
    shipped = shipped_rules()
    return {rule.code for rule in (*shipped.rules, *shipped.notes) if rule.machine_specific}


def place(directory: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what the pages' commands refer to: checkpoints, the tutorial's and the examples' files."""
    monkeypatch.chdir(directory)
    for argument in command.arguments:
        key, _, value = argument.partition("=")
        if key == "algorithm.off_policy.demos":
            (directory / value / "meta").mkdir(parents=True)
            (directory / value / "meta" / "advantages_recap.parquet").touch()
        if key in ("model.warm_start", "model.model_path", "algorithm.teacher") and value.startswith(
            ("outputs/", "DIR")
        ):
            Path(value).mkdir(parents=True)
            Path(value, "config.json").write_text("{}", encoding="utf-8")
            Path(value, "rl_token.json").touch()
        if key == "rollout.replay":
            Path(value).mkdir(parents=True)
            for number in range(1, 4):
                Path(value, f"iteration_{number:06d}.safetensors").touch()
        if key == "reward.model":
            Path(value).mkdir(parents=True)
            Path(value, "config.json").write_text('{"model_type": "embodrl_observation_model"}', encoding="utf-8")
        if key == "model.gaussian.frozen_encoder":
            Path(value).mkdir(parents=True)
        if key == "model.lora_path":
            Path(value).mkdir(parents=True)
            Path(value, "adapter_config.json").write_text("{}", encoding="utf-8")
    Path("my_task").mkdir()
    tutorial.write_files(directory / "my_task")
    for name in ("new_model.py", "small_vla.py"):
        shutil.copy(documented.ROOT / "examples" / "new_model" / name, "my_task")
    Path("examples").symlink_to(documented.ROOT / "examples")
    Path("DIR").mkdir(exist_ok=True)
    shutil.copy("my_task/config.yaml", "DIR/config.yaml")
    monkeypatch.syspath_prepend(str(directory / "my_task"))
    if folder := command.environment.get("PYTHONPATH"):
        monkeypatch.syspath_prepend(folder)
        forget_extensions(monkeypatch, [path.stem for path in Path(folder).glob("*.py")])
