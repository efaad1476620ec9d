"""`embodrl doctor`: whether this machine can train; if not, what is missing and how to get it.

The checks import neither torch nor a simulator into this process; checks that need them run in their own process.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import psutil
from rich.console import Console

from embodrl.preflight import vulkan
from embodrl.preflight.findings import MachineFinding, as_json, can_train, show
from embodrl.preflight.isolated import check_all_pins
from embodrl.preflight.memory import memory_limit_bytes
from embodrl.preflight.simulators import check_libraries, check_simulators, check_vulkan, problems
from embodrl.tools.doctor.extras import check_extras
from embodrl.tools.doctor.presets import CheckedMachine, preset_lacks

GIB = 1 << 30
SUPPORTED_PYTHONS = ((3, 11), (3, 12))
MIN_MEMORY_GIB = 4.0
MIN_SHARED_MEMORY_MIB = 256.0
MIN_DISK_GIB = 2.0


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_python(found: tuple[int, int] = sys.version_info[:2]) -> MachineFinding:
    """Check for Python 3.11 or 3.12."""
    text = f"{found[0]}.{found[1]} ({sys.executable})"
    if found in SUPPORTED_PYTHONS:
        return MachineFinding("Python", "ok", text)
    return MachineFinding("Python", "error", text, "create the virtual environment with Python 3.11 or 3.12")


def check_cpu() -> MachineFinding:
    """Check the cores that this process may use."""
    usable = len(os.sched_getaffinity(0))
    present = os.cpu_count() or 1
    text = f"{usable} of {present} cores usable"
    if usable < 2:
        return MachineFinding("CPU", "warning", text, "simulation and training share one core; two or more are faster")
    return MachineFinding("CPU", "ok", text)


def check_memory() -> MachineFinding:
    """Check the memory for two simulators, the policy and its optimizer."""
    limit = memory_limit_bytes() / GIB
    available = psutil.virtual_memory().available / GIB
    text = f"{limit:.1f} GiB, {min(limit, available):.1f} GiB available"
    if limit < MIN_MEMORY_GIB:
        return MachineFinding("memory", "warning", text, "lower env.num_processes and env.train.total_num_envs")
    return MachineFinding("memory", "ok", text)


def check_shared_memory(path: Path = Path("/dev/shm"), min_mib: float = MIN_SHARED_MEMORY_MIB) -> MachineFinding:
    """Check /dev/shm for Ray and NCCL; memory shared with simulators does not use it."""
    if not path.is_dir():
        hint = "mount it: mount -t tmpfs tmpfs /dev/shm"
        return MachineFinding("shared memory", "warning", f"{path} is missing, which Ray and NCCL use", hint)
    free_mib = shutil.disk_usage(path).free / (1 << 20)
    text = f"{free_mib:.0f} MiB free in {path}"
    if free_mib < min_mib:
        hint = "give the container more (docker run --shm-size=1g), or remount: mount -o remount,size=1g /dev/shm"
        return MachineFinding("shared memory", "warning", f"{text}, which Ray and NCCL use", hint)
    return MachineFinding("shared memory", "ok", text)


def check_disk(path: Path, min_gib: float = MIN_DISK_GIB) -> MachineFinding:
    """Check the disk space for checkpoints and videos in the output directory."""
    existing = path.resolve()
    while not existing.exists():
        existing = existing.parent
    free_gib = shutil.disk_usage(existing).free / GIB
    text = f"{free_gib:.1f} GiB free in {existing}"
    if free_gib < min_gib:
        return MachineFinding("disk", "warning", text, "free some, or set runner.output_dir to another disk")
    return MachineFinding("disk", "ok", text)


def check_torch() -> MachineFinding:
    """Check which torch build is installed, from its metadata."""
    found = installed_version("torch")
    if found is None:
        return MachineFinding("torch", "error", "not installed", "pip install torch (in a clone: make setup)")
    return MachineFinding("torch", "ok", f"{found} ({'CPU build' if '+cpu' in found else 'CUDA build'})")


def check_torchvision(torch: str | None, torchvision: str | None) -> MachineFinding:
    """Check torchvision: a CUDA build with a CPU torch breaks every import of transformers."""
    if torchvision is None:
        return MachineFinding("torchvision", "ok", "not installed (embodrl does not need it)")
    text = f"{torchvision} with torch {torch}"
    if torch is not None and "+cpu" in torch and "+cpu" not in torchvision:
        return MachineFinding(
            "torchvision", "error", f"{text}: `import transformers` fails", "pip uninstall torchvision"
        )
    return MachineFinding("torchvision", "ok", text)


def list_gpus() -> list[tuple[str, int]]:
    """Return name and memory in bytes of the driver's NVIDIA GPUs; empty without a driver."""
    pynvml = importlib.import_module("pynvml")  # untyped package
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        gpus: list[tuple[str, int]] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append((str(pynvml.nvmlDeviceGetName(handle)), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)))
        return gpus
    finally:
        pynvml.nvmlShutdown()


def check_gpu(gpus: list[tuple[str, int]], torch: str | None) -> MachineFinding:
    """Check the GPUs, and whether torch can use them."""
    if not gpus:
        return MachineFinding("GPU", "ok", "none; the policy runs on the CPU")
    text = "; ".join(f"{name}, {size / GIB:.1f} GiB" for name, size in gpus)
    if torch is not None and "+cpu" in torch:
        return MachineFinding("GPU", "warning", text, "torch is a CPU build: EMBODRL_TORCH=cuda make setup")
    return MachineFinding("GPU", "ok", text)


def examine(output_dir: Path, gpus: list[tuple[str, int]], extensions: Sequence[str] = ()) -> Iterator[MachineFinding]:
    """Run every check; frames are rendered only if the driver supports it."""
    torch = installed_version("torch")
    libraries = check_libraries()
    driver = vulkan.probe_in_subprocess()
    yield from (check_python(), check_cpu(), check_memory(), check_shared_memory(), check_disk(output_dir))
    yield from (check_torch(), check_torchvision(torch, installed_version("torchvision")), check_gpu(gpus, torch))
    yield from (libraries, check_vulkan(driver))
    yield from check_simulators(extensions, driver.usable and libraries.status == "ok")
    yield from check_all_pins()
    yield from check_extras()


def summarize(findings: list[MachineFinding], gpus: list[tuple[str, int]]) -> CheckedMachine:
    """Return the findings that the presets need."""
    usable_gpus = gpus if "+cpu" not in (installed_version("torch") or "") else []
    return CheckedMachine(
        simulators=problems(findings),
        memory_bytes=memory_limit_bytes(),
        gpu_bytes=tuple(size for _, size in usable_gpus),
        has_wandb=installed_version("wandb") is not None,
    )


def run_doctor(
    json_output: bool = False,
    output_dir: Path = Path("outputs"),
    console: Console | None = None,
    further: Callable[[], MachineFinding] | None = None,
    extensions: Sequence[str] = (),
    progress: Callable[[MachineFinding], None] = lambda _: None,
) -> int:
    """Check the machine and print the findings; return 0 if training can run, else 1.

    Args:
        json_output: print one JSON object instead of tables.
        output_dir: directory of future runs.
        console: output; standard output by default.
        further: additional check, such as of a configuration's simulator.
        extensions: modules that register environments, whose examples and probes are checked as well.
        progress: called with every completed check.
    """
    console = console or Console()
    gpus = list_gpus() if importlib.util.find_spec("pynvml") else []
    findings: list[MachineFinding] = []
    for finding in chain(examine(output_dir, gpus, extensions), (check() for check in filter(None, [further]))):
        findings.append(finding)
        progress(finding)
    presets = preset_lacks(summarize(findings, gpus))
    if json_output:
        console.out(as_json(findings, presets), highlight=False)
    else:
        show(findings, presets, console)
    return 0 if can_train(findings) else 1
