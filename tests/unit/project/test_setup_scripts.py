"""The shell functions of the set-up, and the Makefile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ("bash", "sed", "cat", "sha256sum", "cut", "grep", "dirname")


def shell(code: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run bash with the functions of scripts/lib.sh, with only ``path`` and a few tools on the PATH."""
    tools = path.parent / "tools"
    tools.mkdir(exist_ok=True)
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        if not (tools / name).exists():
            (tools / name).symlink_to(found)
    script = f"set -euo pipefail; source '{ROOT}/scripts/lib.sh'; {code}"
    variables = {"PATH": f"{path}:{tools}", "HOME": str(path), **environment}
    bash = str(shutil.which("bash"))
    return subprocess.run([bash, "-c", script], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def fake(directory: Path, name: str, body: str) -> Path:
    """Write an executable shell script."""
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def fake_python(directory: Path, name: str, version: str, has_venv: bool = True) -> Path:
    """Write an interpreter that answers the two questions that the set-up asks."""
    supported = 0 if version in ("3.11", "3.12") else 1
    body = f'case "$2" in *ensurepip*) exit {0 if has_venv else 1};; *) echo {version}; exit {supported};; esac'
    return fake(directory, name, body)


def test_first_supported_interpreter_is_taken(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3", "3.10")
    right = fake_python(tmp_path / "bin", "python3.12", "3.12")
    done = shell("find_python", tmp_path / "bin")
    assert done.stdout.strip() == str(right), done.stderr


def test_shim_without_an_interpreter_is_passed_over(tmp_path: Path) -> None:
    fake(tmp_path / "bin", "python3.11", "echo 'command not found' >&2; exit 127")
    right = fake_python(tmp_path / "bin", "python3.12", "3.12")
    assert shell("find_python", tmp_path / "bin").stdout.strip() == str(right)


def test_no_supported_interpreter(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3", "3.13")
    done = shell("find_python", tmp_path / "bin")
    assert done.returncode == 1
    assert "no working Python 3.11 or 3.12" in done.stderr and "PYTHON=" in done.stderr


def test_missing_venv_module_names_the_package(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3", "3.11", has_venv=False)
    done = shell("find_python", tmp_path / "bin")
    assert done.returncode == 1 and "apt install python3.11-venv" in done.stderr


def test_interpreter_with_venv_is_preferred(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3", "3.11", has_venv=False)
    right = fake_python(tmp_path / "bin", "python3.12", "3.12")
    assert shell("find_python", tmp_path / "bin").stdout.strip() == str(right)


def test_python_variable_wins_or_is_refused(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3", "3.12")
    other = fake_python(tmp_path / "elsewhere", "python", "3.11")
    old = fake_python(tmp_path / "old", "python", "3.9")
    assert shell("find_python", tmp_path / "bin", PYTHON=str(other)).stdout.strip() == str(other)
    refused = shell("find_python", tmp_path / "bin", PYTHON=str(old))
    assert refused.returncode == 1 and str(old) in refused.stderr


@pytest.mark.parametrize(
    ("output", "kind"), [("GPU 0: NVIDIA Something (UUID: x)", "cuda"), ("No devices were found", "cpu")]
)
def test_torch_follows_the_gpu(tmp_path: Path, output: str, kind: str) -> None:
    fake(tmp_path / "bin", "nvidia-smi", f"echo '{output}'")
    assert shell("torch_kind", tmp_path / "bin").stdout.strip() == kind
    assert shell("torch_kind", tmp_path / "bin", EMBODRL_TORCH="cpu").stdout.strip() == "cpu"


def test_torch_without_a_driver_is_the_cpu_build(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    assert shell("torch_kind", tmp_path / "bin").stdout.strip() == "cpu"
    wrong = shell("torch_kind", tmp_path / "bin", EMBODRL_TORCH="rocm")
    assert wrong.returncode == 1 and "cpu or cuda" in wrong.stderr


def test_setup_key_follows_what_the_environment_depends_on(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh"):
        (tmp_path / name).write_text(name)
    key = f"setup_key '{sys.executable}'"
    done = shell(
        f"cd '{tmp_path}'; {key} cpu; {key} cpu; {key} cuda; echo more >>constraints.txt; {key} cpu", tmp_path / "bin"
    )
    first, again, other_kind, changed = done.stdout.split()
    assert first == again
    assert len({first, other_kind, changed}) == 3


def test_an_environment_that_is_linked_is_not_cleared(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    (tmp_path / ".venv").symlink_to("other")
    done = subprocess.run(["bash", "scripts/setup.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "rm .venv" in done.stderr
    assert (tmp_path / "other" / "file").exists()


def dry_run(*arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "ARGS"}
    command = ["make", "--dry-run", "-C", str(ROOT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_targets() -> None:
    train = dry_run("train", "ARGS=runner.seed=1")
    assert "scripts/setup.sh" in train
    assert ".venv/bin/embodrl train env=maniskill model=openvla runner.seed=1" in train
    spread = "-m pytest -n 5 --dist loadfile --no-loadscope-reorder --max-worker-restart 0"
    assert f'{spread} -m "not long" -k registry' in dry_run("test", "ARGS=-k registry", "CORES=4")
    assert '-m "not long" tests/unit tests/parity' in dry_run("test-fast")
    assert "--cov --cov-report=term:skip-covered tests/unit tests/parity" in dry_run("coverage")
    everything = dry_run("test-all", "CORES=4")
    assert spread in everything and "-m " not in everything.partition(spread)[2]
    assert "EMBODRL_TESTS_COLD=1" in everything, "as users start them"
    assert "-m pytest -n 5 -m long" in dry_run("test-long", "CORES=4")
    assert "-m pytest -n 0 -m gpu tests/" in dry_run("test-gpu") and "scripts/setup.sh" in dry_run("test-gpu")
    bare = dry_run("test-gpu", "EMBODRL_PYTHON=python3")
    assert "python3 -m pytest -n 0 -m gpu tests/" in bare and "scripts/setup.sh" not in bare
    assert "scripts/setup.sh" in dry_run("test")
    clean = dry_run("clean")
    assert ".venv" in clean and "outputs" not in clean


def test_every_file_with_gpu_tests_is_named_in_the_makefile() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text() and path != Path(__file__)
    }
    named = [word for word in dry_run("test-gpu").split() if word.startswith("tests/")]
    assert marked == set(named)


def test_scripts_are_executable_and_parse() -> None:
    for path in [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]:
        subprocess.run(["bash", "-n", str(path)], check=True)
        assert path.name == "lib.sh" or os.access(path, os.X_OK), path


@pytest.mark.parametrize(
    ("failing", "status"), [("none", 0), ("setup", 1), ("lint", 1), ("docs", 1), ("wheel", 1), ("test", 1)]
)
def test_ci_reports_every_failure(tmp_path: Path, failing: str, status: int) -> None:
    body = f'[ "$1" = test ] && echo "3 passed in 0.12s" && echo chatter\n[ "$1" != {failing} ]'
    fake(tmp_path / "bin", "make", body)
    fake(tmp_path / "scripts", "build_wheel.sh", f"[ {failing} != wheel ]")
    (tmp_path / ".venv").mkdir()
    fake(tmp_path / ".venv" / "bin", "python", "exit 0")
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    variables = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([script], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    if failing == "setup":
        assert done.stdout == ""
    else:
        assert done.stdout.splitlines()[-1] == "3 passed in 0.12s"
