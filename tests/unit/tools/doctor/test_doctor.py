from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
from expect import raises_code
from rich.console import Console

from embodrl.config import load_config
from embodrl.errors import EnvError, EnvTimeout, EnvWorkerDied, MissingDependencyError
from embodrl.models.openvla.spec import num_parameters
from embodrl.preflight import simulators, vulkan
from embodrl.preflight.findings import MachineFinding, as_json, can_train, show
from embodrl.preflight.libraries import missing_libraries
from embodrl.tools.doctor import machine as doctor
from embodrl.tools.doctor.presets import CheckedMachine, judge, lacks, preset_lacks

GIB = 1 << 30


def machine(
    simulator: str = "", memory_gib: int = 8, gpus_gib: tuple[int, ...] = (), has_wandb: bool = False
) -> CheckedMachine:
    return CheckedMachine({"maniskill": simulator}, memory_gib * GIB, tuple(size * GIB for size in gpus_gib), has_wandb)


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), "error"), ((3, 11), "ok"), ((3, 12), "ok"), ((3, 13), "error")]
)
def test_python(version: tuple[int, int], status: str) -> None:
    assert doctor.check_python(version).status == status


@pytest.mark.parametrize(
    ("torch", "torchvision", "status"),
    [
        ("2.13.0+cpu", None, "ok"),
        ("2.13.0+cpu", "0.28.0", "error"),
        ("2.13.0+cpu", "0.28.0+cpu", "ok"),
        ("2.13.0", "0.28.0", "ok"),
    ],
)
def test_torchvision_breaks_a_cpu_torch(torch: str, torchvision: str | None, status: str) -> None:
    finding = doctor.check_torchvision(torch, torchvision)
    assert finding.status == status
    assert ("pip uninstall torchvision" in finding.hint) == (status == "error")


def test_shared_memory_missing_or_full(tmp_path: Path) -> None:
    assert doctor.check_shared_memory(tmp_path / "shm").status == "warning"
    assert doctor.check_shared_memory(tmp_path, min_mib=0).status == "ok"
    full = doctor.check_shared_memory(tmp_path, min_mib=1e12)
    assert full.status == "warning" and "Ray and NCCL" in full.detail


def test_disk_looks_at_the_nearest_directory_that_exists(tmp_path: Path) -> None:
    finding = doctor.check_disk(tmp_path / "outputs" / "run", min_gib=0)
    assert finding.status == "ok" and str(tmp_path.resolve()) in finding.detail
    assert doctor.check_disk(tmp_path, min_gib=1e9).status == "warning"


def test_memory_limit_of_a_container(tmp_path: Path) -> None:
    unlimited = doctor.memory_limit_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.memory_limit_bytes(tmp_path) == unlimited
    (tmp_path / "memory.max").write_text("1048576\n")
    assert doctor.memory_limit_bytes(tmp_path) == 1048576


def test_gpu_beside_a_cpu_torch() -> None:
    gpus = [("Some GPU", 80 * GIB)]
    assert doctor.check_gpu(gpus, "2.13.0").status == "ok"
    assert doctor.check_gpu(gpus, "2.13.0+cpu").status == "warning"
    assert doctor.check_gpu([], "2.13.0+cpu").status == "ok"


@pytest.mark.parametrize(
    ("status", "package"),
    [
        (vulkan.NO_LOADER, "libvulkan1"),
        (vulkan.NO_DEVICE, "mesa-vulkan-drivers"),
        (vulkan.NO_FEATURE, "mesa-vulkan-drivers"),
    ],
)
def test_preflight_names_the_package(monkeypatch: pytest.MonkeyPatch, status: int, package: str) -> None:
    monkeypatch.setattr(simulators, "missing_packages", lambda *_: [])
    monkeypatch.setattr(simulators, "check_libraries", lambda: MachineFinding("system libraries", "ok", ""))
    monkeypatch.setattr(vulkan, "probe_in_subprocess", lambda: vulkan.VulkanReport(status, [], "broken"))
    with raises_code("missing-dependency", MissingDependencyError, "broken") as caught:
        simulators.preflight("maniskill")
    assert package in caught.value.hint


def test_preflight_names_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulators, "missing_packages", lambda *_: [])
    monkeypatch.setattr(simulators, "missing_libraries", lambda: missing_libraries({"libno-such.so.7": "libno-such7"}))
    with raises_code("missing-dependency", MissingDependencyError, "libno-such.so.7") as caught:
        simulators.preflight("maniskill")
    assert "apt install libno-such7" in caught.value.hint


def test_preflight_passes_with_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulators, "missing_packages", lambda *_: [])
    monkeypatch.setattr(simulators, "check_libraries", lambda: MachineFinding("system libraries", "ok", ""))
    monkeypatch.setattr(vulkan, "probe_in_subprocess", lambda: vulkan.VulkanReport(vulkan.USABLE))
    simulators.preflight("maniskill")


def test_preflight_without_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulators.importlib.util, "find_spec", lambda name: None)
    with raises_code("missing-dependency", MissingDependencyError, "mani_skill") as caught:
        simulators.preflight("maniskill")
    assert "embodrl[maniskill]" in caught.value.hint


def frame(name: str) -> MachineFinding:
    return MachineFinding(name, "ok", "one environment and one frame")


def test_the_simulator_of_the_defaults_is_required_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulators, "missing_packages", lambda *_: [])
    registry = simulators.ENVS
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    for name in ("maniskill", "metaworld"):
        # What the process of a simulator whose packages are broken says.
        broken = dataclasses.replace(
            registry.entry(name), example={"no_such_argument": 1}, target="embodrl.envs.toy.env:ToyVectorEnv"
        )
        registry._entries[name] = broken
    assert simulators.check_simulator("maniskill", can_draw=False).detail == "installed"
    found = simulators.check_simulator("maniskill")
    assert (found.name, found.status) == ("maniskill", "error") and "no_such_argument" in found.detail
    assert "embodrl[maniskill]" in found.hint and "Vulkan driver" in found.hint
    assert "no_such_argument" in simulators.problems([found])["maniskill"]
    assert simulators.check_simulator("metaworld").status == "warning"


@pytest.mark.parametrize("error", [EnvWorkerDied, EnvTimeout])
def test_a_driver_that_crashes_or_hangs_is_named_with_what_may_help(
    monkeypatch: pytest.MonkeyPatch, error: type[EnvError]
) -> None:
    def die(manager: object) -> None:
        raise error(
            "env manager 'doctor': killed by SIGSEGV\n--- end of its log\nExtension modules: numpy", "see the log"
        )

    monkeypatch.setattr(simulators.EnvManager, "start", die)
    found = simulators.draw_frame("ManiSkill", "toy", {}, hint="try another driver")
    assert (found.status, found.detail) == ("error", "the simulator's process: killed by SIGSEGV")
    assert found.hint == "try another driver"


def test_what_a_simulator_lacks_is_said_without_the_names_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks_package(manager: simulators.EnvManager) -> None:
        raise EnvError(f"{manager}: Reacher-v5 needs a package")

    monkeypatch.setattr(simulators.EnvManager, "start", lacks_package)
    assert simulators.draw_frame("gymnasium", "toy", {}).detail == "Reacher-v5 needs a package"


@pytest.mark.parametrize(("vulkan_status", "exit_code"), [(vulkan.USABLE, 0), (vulkan.NO_DEVICE, 1)])
def test_run_doctor_as_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vulkan_status: int, exit_code: int
) -> None:
    monkeypatch.setattr(vulkan, "probe_in_subprocess", lambda: vulkan.VulkanReport(vulkan_status, [], "as scripted"))
    monkeypatch.setattr(simulators, "missing_packages", lambda *_: [])
    monkeypatch.setattr(simulators, "check_libraries", lambda: MachineFinding("system libraries", "ok", ""))
    monkeypatch.setattr(doctor, "check_extras", lambda: [frame("extra some")])
    drawn: list[str] = []
    monkeypatch.setattr(simulators, "draw_frame", lambda name, *rest, **options: drawn.append(name) or frame(name))
    monkeypatch.setattr(doctor, "check_shared_memory", lambda: MachineFinding("shared memory", "ok", "enough"))
    monkeypatch.setattr(doctor, "preset_lacks", lambda found: dict([judge("env", "maniskill", found)]))
    out = io.StringIO()
    told: list[str] = []
    code = doctor.run_doctor(
        True, tmp_path, Console(file=out, width=40), progress=lambda finding: told.append(finding.name)
    )
    assert code == exit_code
    report = json.loads(out.getvalue())
    assert told == [check["name"] for check in report["findings"]]
    assert report["can_train"] == (exit_code == 0)
    assert ("maniskill" in drawn) == (vulkan_status == vulkan.USABLE)
    assert ("as scripted" in report["presets"]["env=maniskill"]) == (exit_code == 1)


def test_table_shows_remedies_and_the_verdict() -> None:
    out = io.StringIO()
    findings = [MachineFinding("Vulkan", "error", "no driver", "install 'mesa[vulkan]'")]
    lacking = dict.fromkeys(("env=maniskill", "env=maniskill_pick model=mlp", "experiment=reach"), "no driver")
    presets = {"env=robot_sim model=mlp": "", "model=openvla": "", **lacking, "env=toy": "pip install 'embodrl[toy]'"}
    show(findings, presets, Console(file=out, width=100))
    text = out.getvalue()
    assert "install 'mesa[vulkan]'" in text and "training can't run" in text
    shown = text.partition("presets that run")[2].splitlines()[1:]
    assert shown[:2] == ["  env: robot_sim (with model=mlp)", "  model: openvla"]
    assert shown[3:5] == [
        "  env: maniskill, maniskill_pick; experiment: reach: no driver",
        "  env: toy: pip install 'embodrl[toy]'",
    ]


def test_warnings_do_not_stop_training() -> None:
    findings = [MachineFinding("CPU", "warning", "one core", "use two")]
    assert can_train(findings)
    assert json.loads(as_json(findings, {}))["findings"][0]["hint"] == "use two"


def test_size_of_the_7b_model() -> None:
    size = num_parameters(load_config(["model=openvla_7b"]).config.model)
    assert size == pytest.approx(7.54e9, rel=0.01)  # parameters of the public checkpoint


@pytest.mark.parametrize("name", ["pi05_3b", "gr00t_n1_5_3b"])
def test_memory_is_counted_for_families_whose_size_follows_from_their_layers(name: str) -> None:
    assert "GiB of memory" in judge("model", name, machine(memory_gib=24))[1]
    assert judge("model", name, machine(memory_gib=200))[1] == ""


def test_lacking_memory_gpu_and_wandb() -> None:
    big = load_config(["model=openvla_7b"]).config
    assert "112 GiB of memory" in lacks(big, machine(memory_gib=100))
    assert lacks(big, machine(memory_gib=200)) == ""
    assert "GPU memory" in lacks(big, machine(memory_gib=200, gpus_gib=(24, 80)))
    assert "fp32" in lacks(big, machine(memory_gib=100))
    small = load_config(["cluster.device=cuda", "runner.logger.wandb_mode=offline"]).config
    assert lacks(small, machine()) == "cluster.device=cuda needs a CUDA GPU; W&B needs pip install 'embodrl[wandb]'"
    assert lacks(small, machine(gpus_gib=(24,), has_wandb=True)) == ""


@pytest.mark.long
def test_every_preset_is_judged() -> None:
    judged = preset_lacks(machine(simulator="no driver", memory_gib=1000))
    assert judged["env=maniskill"] == "no driver"
    assert {"model=openvla", "model=openvla_7b"} <= set(judged)


def test_presets_are_judged_beside_what_their_pages_name() -> None:
    large = machine(memory_gib=1000)
    judged = dict([judge("env", "robot_sim", large), judge("model", "pi05_libero", large)])
    assert list(judged.values()) == ["", ""]
    robot, libero = judged
    assert robot.startswith("env=robot_sim model=mlp") and libero.endswith(" env=libero_spatial")
    (lack,) = dict([judge("model", "remote", machine())]).values()
    assert lack.startswith("needs settings:") and "model.url" in lack


@pytest.mark.long
def test_doctor_checks_environments_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = simulators.ENVS
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "examples" / "new_env"))
    monkeypatch.delitem(sys.modules, "line_world", raising=False)
    monkeypatch.delattr("embodrl.envs.registry.SupportedEnv.LINE_WORLD", raising=False)
    registry._entries.pop("line_world", None)
    import line_world  # pyright: ignore[reportMissingImports]  # noqa: F401

    found = simulators.check_simulator("line_world", ("line_world",))
    assert (found.name, found.status) == ("line_world", "ok") and "one environment and one frame" in found.detail
    spec = registry.entry("line_world")
    seen: list[object] = []

    def probe(settings: object, python: str | None) -> list[tuple[str, str]]:
        seen.append((settings, python))
        return [("the rail is not plugged in", "plug it in"), ("no power", "switch it on")]

    registry._entries["line_world"] = dataclasses.replace(spec, probe=probe)
    for name in registry.builtin:
        registry._entries[name] = dataclasses.replace(registry.entry(name), needs=("no_such_package_at_all",))
    custom = [found for found in simulators.check_simulators() if found.name == "line_world"]
    assert [(f.status, f.detail, f.hint) for f in custom] == [
        ("warning", "the rail is not plugged in; no power", "plug it in; switch it on")
    ]
    with raises_code("missing-dependency", MissingDependencyError, "the rail is not plugged in", "no power"):
        simulators.preflight("line_world")
    assert seen == [(None, None)] * 2
    for broken in ((lambda: []), (lambda settings, python: [1])):
        registry._entries["line_world"] = dataclasses.replace(spec, probe=broken)
        with raises_code("spec-probe-raised"):
            simulators.probe("line_world")
