"""Separate Python environments for simulators: made, found, made again, removed."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from expect import raises_code

from embodrl.config import isolated as places
from embodrl.config import load_config
from embodrl.envs.libero import probe
from embodrl.envs.libero.assets import PACKAGE, PARTS
from embodrl.errors import EmbodrlError, UsageError
from embodrl.preflight import isolated, simulators
from embodrl.preflight.findings import MachineFinding, can_train
from embodrl.specs import ENVS
from embodrl.workers.env import check_simulator, try_simulator


@pytest.fixture(autouse=True)
def _simulator_without_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulator whose environment needs nothing from a package index."""
    folder = tmp_path / "requirements"
    folder.mkdir()
    (folder / "libero.txt").write_text("# nothing\n")
    monkeypatch.setattr(places, "REQUIREMENTS", folder)
    needs(monkeypatch, "json")
    monkeypatch.setenv("EMBODRL_LIBERO_ENV", str(tmp_path / "libero"))
    run = isolated._run

    def run_without_pip(command: list[str], *rest: Any) -> None:
        """Bringing pip along takes seconds, and there is nothing for it to install."""
        if "pip" not in command:
            run([*command, "--without-pip"] if "venv" in command else command, *rest)

    monkeypatch.setattr(isolated, "_run", run_without_pip)


def needs(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Have the installation prove itself by importing these modules."""
    monkeypatch.setitem(ENVS._entries, "libero", replace(ENVS.entry("libero"), imports=modules))


def install(prefix: Path | None = None, force: bool = False) -> list[str]:
    lines: list[str] = []
    isolated.install("libero", prefix, force, lines.append)
    return lines


def test_install_is_idempotent_and_found(tmp_path: Path):
    assert places.installed_python("libero") is None
    assert isolated.list_environments()[0].state == "absent"
    install()
    python = places.installed_python("libero")
    assert python == tmp_path / "libero" / "bin" / "python"
    code = "import sys; print(sys.prefix)"
    assert subprocess.check_output([python, "-c", code], text=True).strip() == str(tmp_path / "libero")
    stamp = (tmp_path / "libero" / places.MARKER).stat().st_mtime_ns
    assert install() == [f"libero is already installed: {tmp_path / 'libero'}"]
    assert (tmp_path / "libero" / places.MARKER).stat().st_mtime_ns == stamp
    isolated.remove("libero", None, lambda _: None)
    assert places.installed_python("libero") is None
    assert not (tmp_path / "libero").exists()


def test_a_half_made_environment_is_not_taken_for_whole(tmp_path: Path):
    install()
    mark(tmp_path / "libero", requirements=None)
    assert isolated.list_environments()[0].state == "incomplete"
    assert places.installed_python("libero") is None
    (tmp_path / "libero" / "leftover").write_text("")
    install()
    assert places.installed_python("libero") is not None
    assert not (tmp_path / "libero" / "leftover").exists()


def mark(prefix: Path, **changes: str | None) -> None:
    """Change what the marker says; None takes it out."""
    marker = prefix / places.MARKER
    content = json.loads(marker.read_text()) | changes
    marker.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_other_pins_make_it_outdated_which_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(simulators, "probe", lambda *_: [])
    config = load_config(["env=libero"]).config
    install()
    check_simulator(config)
    assert isolated.check_all_pins() == [] and not caplog.messages
    mark(tmp_path / "libero", requirements="old")
    assert isolated.list_environments()[0].state == "outdated"
    [found] = isolated.check_all_pins()
    assert (found.status, found.hint) == ("warning", "embodrl env install libero")
    check_simulator(config)
    [told] = caplog.messages
    assert str(tmp_path / "libero") in told and found.hint in told
    named = load_config(["env=libero", f"env.python={places.installed_python('libero')}"]).config
    check_simulator(named)
    assert len(caplog.messages) == 1, "an interpreter that the user names is the user's affair"
    install()
    assert isolated.list_environments()[0].state == "ready"


def test_a_directory_of_another_simulator_is_no_installation(tmp_path: Path):
    install()
    mark(tmp_path / "libero", name="another")
    assert places.installed_python("libero") is None
    assert isolated.check_all_pins() == []
    with raises_code("env-directory-foreign", UsageError, tmp_path / "libero"):
        install(force=True)


def test_a_failing_pip_leaves_nothing_that_is_used(monkeypatch: pytest.MonkeyPatch):
    needs(monkeypatch, "a_package_that_clashes")
    with raises_code("env-install-failed", EmbodrlError, "a_package_that_clashes"):
        install()
    assert places.installed_python("libero") is None
    assert isolated.list_environments()[0].state == "incomplete"
    isolated.remove("libero", None, lambda _: None)


@pytest.mark.parametrize("of_venv", [False, True])
@pytest.mark.parametrize("by_option", [False, True])
def test_a_foreign_directory_is_left_alone(of_venv: bool, by_option: bool, tmp_path: Path):
    """Even one that looks like a virtual environment: only the marker tells who made it."""
    folder = tmp_path / ("myvenv" if by_option else "libero")  # that of $EMBODRL_LIBERO_ENV
    prefix = folder if by_option else None
    (folder / "work").mkdir(parents=True)
    (folder / "work" / "thesis.tex").write_text("mine")
    if of_venv:
        (folder / "pyvenv.cfg").write_text("home = /usr\n")
    before = sorted(folder.rglob("*"))
    for force in (False, True):
        with raises_code("env-directory-foreign", UsageError, folder):
            install(prefix, force)
    with raises_code("env-directory-foreign", UsageError, folder):
        isolated.remove("libero", prefix, lambda _: None)
    assert sorted(folder.rglob("*")) == before and (folder / "work" / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("content", [{"name": "libero"}, {"name": "libero", "prefix": "/elsewhere"}])
def test_a_marker_of_another_directory_proves_nothing(content: dict[str, str], tmp_path: Path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / places.MARKER).write_text(json.dumps(content))
    (folder / "thesis.tex").write_text("mine")
    with raises_code("env-directory-foreign", UsageError, folder):
        isolated.remove("libero", folder, lambda _: None)
    assert (folder / "thesis.tex").read_text() == "mine"


def test_the_marker_is_written_first_and_removed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as broken, pytest.raises(OSError, match="full"):
        broken.setattr(isolated, "_run", refuse)
        install()
    assert [path.name for path in (tmp_path / "libero").iterdir()] == [places.MARKER]
    install()
    with monkeypatch.context() as broken, pytest.raises(OSError, match="full"):
        broken.setattr(isolated.shutil, "rmtree", refuse)
        isolated.remove("libero", None, lambda _: None)
    assert isolated.list_environments()[0].state == "incomplete"
    assert places.installed_python("libero") is None
    isolated.remove("libero", None, lambda _: None)
    assert not (tmp_path / "libero").exists()


def test_unknown_simulators_are_refused():
    with raises_code("usage", UsageError, "'libero'"):
        isolated.install("liberoo", None, False, lambda _: None)


def test_the_shipped_pins_are_exact_and_name_no_index():
    text = (Path(places.__file__).parents[1] / "envs" / "requirements" / "libero.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and "/" not in line and not line.startswith("-") for line in lines)
    assert not any(line.startswith(("torch", "nvidia")) for line in lines)


def test_a_libero_that_does_not_run_does_not_keep_others_from_training(monkeypatch: pytest.MonkeyPatch):
    install()
    broken = MachineFinding("libero", "error", "it draws an empty picture", "another driver")
    monkeypatch.setattr(simulators, "probe", lambda *_: [])
    monkeypatch.setattr(simulators, "draw_frame", lambda *_, **__: broken)
    found = simulators.check_simulator("libero")
    assert can_train([found]) and found.hint == broken.hint
    # What a configuration asks for is another matter.
    monkeypatch.setattr(simulators, "draw_frame", lambda name, *_: replace(broken, name=name))
    config = load_config(["env=libero"]).config
    found = try_simulator(config)
    assert found.name == "env=libero" and not can_train([found])


def test_packages_of_this_environment_are_not_those_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install()
    (tmp_path / "here" / "libero").mkdir(parents=True)
    (tmp_path / "here" / "libero" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "here"))
    assert probe.find_package(str(places.installed_python("libero")), "libero") is None


def test_all_that_libero_lacks_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("EMBODRL_LIBERO_ASSETS", raising=False)
    install()
    python = str(places.installed_python("libero"))
    assert probe.find_package(python, "libero") is None
    settings = load_config(["env=libero"]).config.env.model_copy(update={"libero_assets": str(tmp_path)})
    with raises_code("missing-dependency", EmbodrlError, "embodrl env install libero"):
        simulators.preflight("libero", python, settings)
    assert os.access(python, os.X_OK)


def test_the_probe_finds_the_assets_that_were_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("EMBODRL_LIBERO_ASSETS", raising=False)
    install()
    python = str(places.installed_python("libero"))
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    folder = Path(subprocess.check_output(command, text=True).strip()) / PACKAGE
    (folder / "assets" / "scenes").mkdir(parents=True)
    for part in PARTS:
        (folder / part).write_text("")
    assert probe.find_package(python, PACKAGE) == folder
    assert len(probe.find_problems(None, python)) == 1  # LIBERO itself
    (folder / PARTS[2]).unlink()
    _, (message, hint) = probe.find_problems(None, python)
    assert PARTS[2] in message and "embodrl env install libero" in hint


@pytest.mark.parametrize(("found", "warns"), [("3.2.3", False), ("3.3.2", False), ("3.3.3", True), ("3.10.0", True)])
def test_a_mujoco_that_draws_libero_otherwise_is_reported(monkeypatch: pytest.MonkeyPatch, found: str, warns: bool):
    monkeypatch.setattr(probe.metadata, "version", lambda _: found)
    findings = simulators.find_warnings("libero", None)
    assert [(finding.name, finding.status) for finding in findings] == [("mujoco-version", "warning")] * warns


def test_an_interpreter_without_mujoco_is_not_warned_of():
    install()
    assert probe.find_warnings(str(places.installed_python("libero"))) == []
