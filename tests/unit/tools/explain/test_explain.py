"""`embodrl explain`: settings, sections and error codes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from embodrl.cli.main import app
from embodrl.config.check import schema_keys, shipped_schemas
from embodrl.tools.explain import codes, keys


def explain(*names: str) -> Result:
    return CliRunner().invoke(app, ["explain", *names])


def test_a_key_has_its_facts() -> None:
    text = explain("algorithm.kl.estimator").stdout
    assert "default:   k3" in text and "allowed:   k1, k2, k3" in text
    assert "only with: algorithm.kl.coef" in text  # as its section says
    assert "kl-has-a-gradient (note)" in text and "sampling-explores" not in text
    assert "read by:   collect, " in explain("algorithm.gamma").stdout
    assert "at least 0 and at most 1" in explain("algorithm.gamma").stdout
    assert "presets:   algorithm=ppo sets it to none" in explain("algorithm.bootstrap_type").stdout
    assert "no effect: if the estimator uses no values" in explain("algorithm.bootstrap_type").stdout


def test_the_key_of_a_simulator_names_it() -> None:
    assert "of:        env.env_type=gymnasium, env.env_type=robot" in explain("env.instruction").stdout
    assert "of:" not in explain("env.tasks").stdout.partition("type:")[0]


def test_a_section_lists_its_keys() -> None:
    result = explain("algorithm.kl")
    assert result.exit_code == 0
    assert all(f"algorithm.kl.{name} = " in result.stdout for name in ("coef", "estimator", "placement"))


@pytest.mark.parametrize("name", ["cluster.node_groups.label", "cluster.node_groups.0.label", "env.cameras[0].width"])
def test_a_key_of_an_item_is_found_with_its_index_and_without(name: str) -> None:
    assert explain(name).exit_code == 0


def test_a_code_has_its_messages_and_what_to_do() -> None:
    text = explain("config-unknown-key", "config-range", "env-timeout").stdout
    assert "message:   no such key in" in text
    assert "hint:      give a number within the range" in text
    assert codes.CURES["env-timeout"].partition(",")[0] in text


def test_a_name_may_be_a_section_and_a_code() -> None:
    text = explain("store").stdout
    assert text.startswith("store\n") and "\nstore: an error\n" in text


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("algorithm.gama", "algorithm.gamma"),
        ("gamma", "algorithm.gamma"),
        ("config-unkown-key", "config-unknown-key"),
        ("env_timeout", "env-timeout"),
        ("zzzzzz", ""),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, near: str) -> None:
    result = explain("env.tasks", name)
    assert result.exit_code == 2 and not result.stdout
    assert f"'{name}'" in result.stderr and "code: explain-unknown-name" in result.stderr
    assert (f"nearest: {near};" if near else "hint: `embodrl config show`") in result.stderr


def test_every_key_is_found() -> None:
    names = {key for schema in shipped_schemas() for key in schema_keys(schema)}
    assert [name for name in names if not keys.find(name)] == []


def test_it_imports_no_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom embodrl.cli.main import app\n"
        "result = CliRunner().invoke(app, ['explain', 'model', 'config-range'])\n"
        "print(result.exit_code, sorted({'torch', 'transformers', 'mani_skill'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "0 []\n", result.stderr
