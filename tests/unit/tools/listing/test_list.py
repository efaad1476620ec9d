"""`embodrl list`: what a user may choose from, without importing what it is made of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.config.presets import presets
from embodrl.specs import ENVS, MODELS
from embodrl.tools.listing.tables import as_text, envs, models


def blocks() -> dict[str, dict[str, str]]:
    """Return label -> text of each family, parsed from what is printed; the description has the label ''."""
    found: dict[str, dict[str, str]] = {}
    for line in as_text(models()).splitlines():
        if not line.startswith("   "):
            name, _, description = line.strip().partition(" ")
            found[name] = {"": description.strip()}
        else:
            label, _, text = line.strip().partition(" ")
            found[list(found)[-1]][label] = text.strip()
    return found


@pytest.mark.parametrize("name", list(MODELS.builtin))
def test_every_family_has_its_facts(name: str) -> None:
    entry, block = MODELS.entry(name), blocks()[name]
    assert block[""] == entry.description
    assert block["parameters"] == entry.sizes
    assert block["actions"] == entry.actions
    assert block["RL"] == entry.rl
    assert block.get("trainable", "") == ", ".join(entry.trainable or ())
    assert block["checkpoint"] == entry.checkpoint


OF_ONE_SIZE = ("lerobot", "remote", "remote_text", "gaussian", "planner")


@pytest.mark.parametrize("name", [name for name in MODELS.builtin if name not in OF_ONE_SIZE])
def test_the_tiny_size_is_reported_as_it_is(name: str) -> None:
    import torch

    from embodrl.config.schema import model_settings
    from embodrl.models.registry import build_policy

    config = model_settings(name)(model_type=name, warm_start=None)
    policy, _ = build_policy(config, device="meta", dtype=torch.float32, seed=0)
    count = sum(parameter.numel() for parameter in policy.parameters())
    assert MODELS.entry(name).sizes.startswith(f"{count / 1e6:.1f} M (tiny), ")


def test_a_family_without_facts_is_listed_by_its_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
    MODELS.add("mine", "nowhere:build", "a model of mine")
    assert blocks()["mine"] == {"": "a model of mine"}


def test_tasks_are_listed_below_their_suites() -> None:
    lines = [line.strip().split(maxsplit=1) for line in as_text(envs()).splitlines()]
    listed: dict[str, list[str]] = {}
    for label, text in lines:
        if label == "suite":
            listed[text.partition(",")[0]] = []
        elif label == "task" and listed:
            listed[list(listed)[-1]].append(text)
        elif listed:
            break  # the next environment
    spec = ENVS.entry("libero")
    for name, suite in spec.suites.items():
        assert listed.pop(f"env.suite={name}") == [f"{task}: {text}" for task, text in suite.tasks.items()]
    assert not listed


def test_a_list_as_json_has_what_the_text_has(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("presets: {env: toy}\n")
    outcome = CliRunner().invoke(app, ["list", "envs", "--json", "--config", str(tmp_path / "mine.yaml")])
    listed = {entry["name"]: entry for entry in json.loads(outcome.stdout)["envs"]}
    assert list(listed) == list(ENVS)
    tasks = [f"{task}: {text}" for task, text in ENVS.entry("toy").instructions().items()]
    assert listed["toy"]["description"] == ENVS.entry("toy").description and listed["toy"]["task"] == tasks


@pytest.mark.parametrize("groups", [["env"], ["model", "algorithm"]])
def test_presets_are_listed_by_group(groups: list[str]) -> None:
    outcome = CliRunner().invoke(app, ["list", "presets", *groups, "extensions=[]"])
    assert outcome.exit_code == 0, outcome.output
    listed = [line.split()[0] for line in outcome.stdout.splitlines()[1:] if not line.startswith("   ")]
    assert listed == [f"{group}={name}" for group in groups for name in presets(group)]


def test_a_group_that_is_none_is_refused() -> None:
    outcome = CliRunner().invoke(app, ["list", "presets", "envs"])
    assert outcome.exit_code == 2 and "unknown group of presets 'envs'" in outcome.output
    assert "argument-form" in CliRunner().invoke(app, ["list", "models", "env"]).output


def test_listing_imports_neither_torch_nor_a_simulator() -> None:
    program = (
        "import sys\nfrom embodrl.cli.main import main\nsys.argv = ['embodrl', 'list', 'models']\n"
        "try:\n    main()\nexcept SystemExit as leave:\n    assert not leave.code\n"
        "print(sorted({'torch', 'transformers', 'mani_skill', 'numpy'} & set(sys.modules)))\n"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert outcome.stdout.splitlines()[-1] == "[]"
    assert all(f"\n  {name} " in outcome.stdout for name in MODELS.builtin)
