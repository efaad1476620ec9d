"""Where parts stand, and which of them a run loads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from embodrl.names import import_object
from embodrl.registry import Registry
from embodrl.scheduler.launchers.base import PACKAGE_ROOT
from embodrl.specs import (
    ADVANTAGES,
    ENGINES,
    ENV_SERVERS,
    ENVS,
    LAUNCHERS,
    LOSSES,
    MODELS,
    PIPELINES,
    PROTOCOLS,
    SERVE_PROTOCOLS,
    SMALL_ACTORS,
    VERBS,
    WORKFLOW_RUNNERS,
)

ROOT = Path(__file__).parents[3]
LOADED = """
import json, sys
from embodrl.cli.main import app
from embodrl.pipelines.load import load_config
loaded = load_config(["env=maniskill", "model=openvla"], verb="train")
from embodrl.runs import train
from embodrl.envs.registry import SupportedEnv
from embodrl.models.openvla import build
from embodrl.hybrid_engines.training import native
from embodrl.hybrid_engines.rollout import native as acting
print(json.dumps([name for name in sys.modules if name.startswith("embodrl.")]))
"""
REGISTRIES: list[Registry] = [
    *(ADVANTAGES, ENGINES, ENV_SERVERS, ENVS, LAUNCHERS, LOSSES, MODELS, PIPELINES, PROTOCOLS, SERVE_PROTOCOLS),
    *(SMALL_ACTORS, VERBS, WORKFLOW_RUNNERS),
]


def folders_of(modules: Iterable[str], room: str, parts: Iterable[str]) -> set[str]:
    """Return the folders of registered parts that have loaded modules."""
    folders = {part.partition(":")[0].removesuffix(".spec") for part in parts}
    folders = {folder for folder in folders if folder.startswith(f"embodrl.{room}.")}
    return {folder for folder in folders for name in modules if name == folder or name.startswith(f"{folder}.")}


def test_the_front_pages_run_loads_one_family_one_simulator_and_one_engine() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120, check=True)
    modules: list[str] = json.loads(done.stdout)
    assert folders_of(modules, "models", MODELS.builtin.values()) == {"embodrl.models.openvla"}
    assert folders_of(modules, "envs", ENVS.builtin.values()) == {"embodrl.envs.maniskill"}
    others = {f"embodrl.hybrid_engines.training.{name}" for name in ("fsdp", "megatron", "tensor_parallel")}
    others |= {f"embodrl.hybrid_engines.rollout.{name}" for name in ("remote", "vllm")}
    others |= {"embodrl.tools", "embodrl.store", "embodrl.serving", "embodrl.workers.workflows"}
    assert not others & set(modules)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_every_built_in_part_is_there(registry: Registry) -> None:
    assert registry.builtin
    for name, place in registry.builtin.items():
        entry = registry.entry(name)
        assert entry.name == name and place.startswith("embodrl.")
        # Engines and protocols of evaluations are described by other facts; simulators need packages of their own.
        if entry.target and isinstance(entry.target, str) and not entry.target.startswith("embodrl.envs."):
            assert import_object(entry.target) is not None


def test_every_folder_with_a_spec_is_in_a_table() -> None:
    listed = {place.partition(":")[0] for registry in REGISTRIES for place in registry.builtin.values()}
    found = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "embodrl").rglob("spec.py")}
    assert found <= listed


def test_embodrl_itself_declares_no_entry_point() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "[project.entry-points" not in text and "[project.scripts]" in text


def test_an_older_installation_may_still_list_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "old-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: old\nVersion: 1.0\n")
    points = "[embodrl.verbs]\ngone = embodrl.no_such_room.spec:VERB\nlist = embodrl.no_such_room.spec:VERB\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert entry_points(group="embodrl.verbs").select(name="gone")
    registry = Registry("verb", VERBS.cls, VERBS.group, "embodrl.cli.registry:VERBS")
    assert "gone" not in registry and registry.entry("list").name == "list"


def test_no_folder_of_tests_passes_for_a_package_that_is_looked_for() -> None:
    """pytest puts the folders of tests on ``sys.path``, where a folder is a namespace package of its name."""
    sources = "".join(path.read_text() for path in (*ROOT.glob("embodrl/**/*.py"), *ROOT.glob("tests/helpers/*.py")))
    wanted = set(re.findall(r"find_spec\(\"(\w+)", sources)) | {"mujoco", "gymnasium", "libero", "metaworld", "vllm"}
    on_path = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    folders = {path.name for path in on_path if path.parent in on_path}
    assert not wanted & folders


def test_a_run_imports_the_code_of_its_own_parts_alone(tmp_path: Path) -> None:
    """A real iteration of parts that are not the defaults; specs, which are facts, may be read of others."""
    code = (
        "import embodrl, json, sys; embodrl.train(sys.argv[1:]);"
        "print(json.dumps([name for name in sys.modules if name.startswith('embodrl.')]))"
    )
    settings = ["env=toy", "model=mlp", "algorithm=ppo_gaussian", "model.gaussian.hidden_sizes=[8]", "env.state=full"]
    settings += ["env.cameras=[{height: 16, width: 16}]", "env.train.total_num_envs=4", "env.num_processes=1"]
    settings += ["env.train.max_steps_per_rollout_epoch=20", "env.pin_cpus=false", "env.video.enabled=false"]
    settings += ["runner.max_iterations=1", "runner.eval_interval=0", "actor.optim.critic_warmup_iterations=0"]
    settings += ["env.eval.num_episodes=4", "env.eval.decoding=greedy", "runner.logger.console=off"]
    settings += ["actor.global_batch_size=4", "actor.micro_batch_size=4", f"runner.output_dir={tmp_path / 'run'}"]
    settings += ["cluster.device=cpu", "cluster.num_threads=1", "runner.logger.tensorboard=false"]
    command = [sys.executable, "-c", code, *settings]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert outcome.returncode == 0, outcome.stderr
    loaded = json.loads(outcome.stdout.splitlines()[-1])
    code_of = {name.split(".")[2] for name in loaded if re.fullmatch(r"embodrl\.models\.\w+\.(policy|modeling)", name)}
    assert code_of == {"gaussian"}
    envs = {name.split(".")[2] for name in loaded if re.fullmatch(r"embodrl\.envs\.\w+\.env", name)}
    assert envs <= {"toy"}, "simulators run in processes of their own"
    engines = {
        name for name in loaded if re.match(r"embodrl\.hybrid_engines\.(training|rollout)\.(fsdp|\w+\.engine)", name)
    }
    assert not engines


def test_workers_import_the_package_from_the_directory_that_contains_it() -> None:
    """Not from the package itself, where ``types.py`` would stand in for the standard library's."""
    assert (Path(PACKAGE_ROOT) / "embodrl" / "__init__.py").is_file()
