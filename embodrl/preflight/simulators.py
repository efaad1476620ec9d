"""Whether a simulator can run: its packages, the probe of its spec, and a renderer. Imports no simulator.

The proof is one environment and one rendered frame, in the interpreter that would run the simulator.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from embodrl.config.isolated import ask, installed_python
from embodrl.config.schema import EnvConfig
from embodrl.envs.mujoco_gl import GL_HINT, GL_LIBRARIES, loads
from embodrl.envs.pool.manager import EnvManager
from embodrl.envs.pool.options import EnvTimeouts
from embodrl.errors import EmbodrlError, EnvError, EnvRaised, EnvTimeout, EnvWorkerDied, MissingDependencyError
from embodrl.names import import_function
from embodrl.preflight import vulkan
from embodrl.preflight.findings import MachineFinding
from embodrl.preflight.libraries import missing_libraries
from embodrl.specs import ENVS, SimulatorSpec
from embodrl.user_code import guard_user_code

RENDER_TIMEOUT_S = 120.0
# How an error names the environment started by doctor.
MANAGER = re.compile(r"env manager 'doctor'( \([^)]*\))?")
FRAME_TIMEOUTS = EnvTimeouts(300.0, 300.0, 300.0)
# Renderer -> its checks.
DRAWING = {"vulkan": ("system libraries", "Vulkan"), "mujoco": ("MuJoCo rendering",)}
REQUIRED: str = EnvConfig.model_fields["env_type"].default
"""The simulator of the default configuration; if absent, `embodrl doctor` reports an error."""
INSTALLER = "in a clone: scripts/install_system_packages.sh"
MESA = "apt install mesa-vulkan-drivers, on Debian 12 with -t bookworm-backports"
VULKAN_HINTS = {
    vulkan.NO_LOADER: f"install the Vulkan loader: apt install libvulkan1 ({INSTALLER})",
    vulkan.NO_DEVICE: f"install a Vulkan driver: {MESA} ({INSTALLER})",
    vulkan.NO_FEATURE: f"install a newer Mesa: {MESA} ({INSTALLER})",
}
VIDEO_MODULES = ("imageio", "imageio_ffmpeg")
FIND_MODULES = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"
DRAW = """
import json
from embodrl.envs.mujoco_gl import choose_gl, draws_in_software
gl = choose_gl()
import mujoco
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><light pos='0 0 2'/><geom type='sphere' size='.3' rgba='1 0 0 1'/></worldbody></mujoco>"
)
data = mujoco.MjData(model)
mujoco.mj_step(model, data)
renderer = mujoco.Renderer(model, 64, 64)
renderer.update_scene(data)
contrast = float(renderer.render().std())
print(json.dumps({"contrast": contrast, "gl": gl, "software": draws_in_software()}), flush=True)
"""


def missing_packages(env_type: str, python: str | None = None) -> list[str]:
    """Return the modules that an environment needs and an interpreter (None: this one) lacks.

    Raises:
        MissingDependencyError: the interpreter can't be run.
    """
    spec = ENVS.entry(env_type)
    if spec.isolated:  # its pinned packages were installed together; its probe checks more
        return []
    # The simulator processes themselves need numpy, which a user's interpreter may lack.
    return missing_modules((*spec.needs, "numpy") if python is not None else spec.needs, python)


def missing_modules(names: Sequence[str], python: str | None = None) -> list[str]:
    """Return the given modules that an interpreter (None: this one) lacks; raises as ``missing_packages``."""
    if python is None:
        return [name for name in names if importlib.util.find_spec(name) is None]
    hint = "set env.python to the interpreter of a virtual environment that has the simulator"
    try:
        done = ask(python, FIND_MODULES, *names)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependencyError(
            f"env.python {python} can't be run: {error}", hint, code="python-not-runnable"
        ) from error
    if done.returncode != 0:
        raise MissingDependencyError(
            f"env.python {python} can't be run: {done.stderr.strip()[-200:]}", hint, code="python-not-runnable"
        )
    return done.stdout.split()


def check_simulator(env_type: str, extensions: Sequence[str] = (), can_draw: bool = True) -> MachineFinding:
    """Check packages, probe and, if ``can_draw``, one frame of a simulator.

    Only the default simulator's absence is an error.
    """
    spec = ENVS.entry(env_type)
    python = _own_python(env_type)
    missing = missing_packages(env_type, python)
    if missing:
        detail = f"not installed: {', '.join(missing)}"
        required = env_type == REQUIRED
        detail += "" if required else f"; for env={env_type} only"
        return MachineFinding(env_type, "error" if required else "ok", detail, _install_hint(spec, missing))
    found = probe(env_type, None, python)
    if found:
        message, hint = ("; ".join(part) for part in zip(*found, strict=True))
        return MachineFinding(env_type, "warning", message, hint)
    if spec.example is None:
        return MachineFinding(env_type, "ok", "its probe found no problem")
    if not can_draw:
        return MachineFinding(env_type, "ok", "installed")
    hint = f"reinstall it: {_install_hint(spec)}{' --force' * spec.isolated}" if env_type in ENVS.builtin else ""
    hint += f"; or try another Vulkan driver: {MESA}" * (spec.draws_with == "vulkan")
    frame = draw_frame(env_type, env_type, spec.example, python, extensions, hint)
    frame = replace(frame, detail=f"{_versions(spec)}{frame.detail}")
    return frame if env_type == REQUIRED else optional(frame)


def _versions(spec: SimulatorSpec) -> str:
    """Return the versions of a simulator's packages in this environment, as the start of a text."""
    found: list[str] = []
    for name in spec.needs:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return f"{', '.join(found)}: " if found else ""


def find_warnings(env_type: str, python: str | None) -> list[MachineFinding]:
    """Return warnings about a simulator that runs."""
    called = ENVS.entry(env_type).warnings
    found = import_function(called)(python) if called else []
    return [MachineFinding(name, "warning", message, hint) for name, message, hint in found]


def _own_python(env_type: str) -> str | None:
    """Return the interpreter that ``env.python: auto`` finds for a simulator; None for this one."""
    python = installed_python(env_type)
    return None if python is None else str(python)


def probe(env_type: str, settings: EnvConfig | None = None, python: str | None = None) -> list[tuple[str, str]]:
    """Return the problems found by the probe of a spec, with hints; raises EmbodrlError if the probe failed."""
    called = ENVS.entry(env_type).probe
    if called is None:
        return []
    try:
        found = import_function(called) if isinstance(called, str) else called
        with guard_user_code(f"the probe of '{env_type}'"):
            return [(str(message), str(hint)) for message, hint in found(settings, python)]
    except EmbodrlError:
        raise
    except Exception as error:  # a custom probe may raise anything
        raise EmbodrlError(
            f"the probe of '{env_type}' raised {type(error).__name__}: {error}",
            "it is called with the section env (or None) and an interpreter (or None), and returns pairs of text",
            code="spec-probe-raised",
        ) from error


def _install_hint(spec: SimulatorSpec, missing: Sequence[str] = ()) -> str:
    if spec.isolated:
        return f"embodrl env install {spec.name}"
    in_a_clone = " (in a clone: make setup)" * (spec.name == REQUIRED)
    # A custom environment has no extra.
    return f"pip install 'embodrl[{spec.extra}]'{in_a_clone}" if spec.extra else f"install {', '.join(missing)}"


def optional(found: MachineFinding) -> MachineFinding:
    """Turn an error into a warning: training can run without an unused simulator."""
    return replace(found, status="warning") if found.status == "error" else found


def draw_frame(
    name: str,
    env_type: str,
    kwargs: Mapping[str, object],
    python: str | None = None,
    extensions: Sequence[str] = (),
    hint: str = "",
) -> MachineFinding:
    """Make one environment, reset it and render one frame, in a separate process.

    Args:
        name: name of the finding.
        env_type: name in the environment registry.
        kwargs: keyword arguments of the VectorEnv, without ``num_envs``.
        python: interpreter; None for this one.
        extensions: modules that register environments.
        hint: default hint for errors without one.
    """
    start = time.monotonic()
    try:
        with EnvManager(
            env_type,
            {**kwargs, "num_envs": 1},
            name="doctor",
            python=python,
            timeouts=FRAME_TIMEOUTS,
            extensions=extensions,
        ) as manager:
            contrast = float(manager.reset(np.zeros(1, np.int64), np.zeros(1, np.int32)).images.std())
    except (EnvWorkerDied, EnvTimeout) as error:  # the rest is the tail of a log, and the limits are doctor's own
        what = MANAGER.sub("the simulator's process", error.message.partition("\n")[0])
        return MachineFinding(name, "error", what, hint or error.hint)
    except EnvError as error:
        lines = [line.strip() for line in error.message.splitlines() if line.strip() and not line.startswith("---")]
        # A simulator's error ends with its hint.
        what = next((line for line in reversed(lines) if not line.startswith("hint:")), lines[-1])
        what = re.sub(rf"^((\w+\.)+\w+|{MANAGER.pattern}): ", "", what)  # a class name does not help users
        # The hint of a bare exception is for authors of simulators.
        raised_by_simulator = error.code == EnvRaised.code and hint
        return MachineFinding(name, "error", what, hint if raised_by_simulator else error.hint or hint)
    if contrast == 0:
        other = (
            "try another Vulkan driver"
            if ENVS.entry(env_type).draws_with == "vulkan"
            else "try MUJOCO_GL=osmesa, or another driver"
        )
        return MachineFinding(name, "error", "it renders an empty image", other)
    seconds = time.monotonic() - start
    return MachineFinding(
        name, "ok", f"one environment and one frame in {seconds:.1f} s ({python or 'this environment'})"
    )


def missing_gl() -> str:
    """Return why MuJoCo can't render, as far as files tell; "" if nothing is missing."""
    if os.environ.get("MUJOCO_GL") or any(map(loads, GL_LIBRARIES.values())):
        return ""
    return "neither libEGL nor libOSMesa can be loaded"


def check_mujoco_rendering(timeout_s: float = RENDER_TIMEOUT_S) -> MachineFinding:
    """Render one frame of MuJoCo in a separate process, since a faulty driver may crash or hang."""
    name = "MuJoCo rendering"
    hint = GL_HINT
    if missing_gl():
        return MachineFinding(name, "warning", missing_gl(), hint)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", DRAW], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return MachineFinding(name, "warning", f"no frame within {timeout_s:g} s", hint)
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:  # the exit status does not count: some drivers fail at interpreter exit
        lines = done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"]
        return MachineFinding(name, "warning", lines[-1], hint)
    answer: dict[str, object] = json.loads(answers[-1])
    if answer["contrast"] == 0:
        return MachineFinding(name, "warning", f"MUJOCO_GL={answer['gl']} renders an empty image", hint)
    return MachineFinding(name, "ok", f"MUJOCO_GL={answer['gl']}, on the {'CPU' if answer['software'] else 'GPU'}")


def check_libraries() -> MachineFinding:
    """Check the system libraries that Vulkan renderers load."""
    missing = missing_libraries()
    if missing:
        packages = " ".join(missing.values())
        hint = f"apt install {packages} ({INSTALLER})"
        return MachineFinding("system libraries", "error", f"missing: {', '.join(missing)}", hint)
    return MachineFinding("system libraries", "ok", "all there")


def check_vulkan(report: vulkan.VulkanReport) -> MachineFinding:
    """Check for a Vulkan device with the features of SAPIEN's renderer."""
    if not report.usable:
        return MachineFinding("Vulkan", "error", report.detail, VULKAN_HINTS[report.status])
    devices = [f"{d.name}: {d.driver}, Vulkan {d.api_version}" for d in report.devices if d.partially_bound]
    return MachineFinding("Vulkan", "ok", "; ".join(devices))


def _checked() -> list[SimulatorSpec]:
    """Return the simulators with an example or a probe, the default one first."""
    return sorted((spec for spec in ENVS.all() if spec.probe or spec.example), key=lambda spec: spec.name != REQUIRED)


def _is_absent(spec: SimulatorSpec) -> bool:
    """Whether a simulator with a separate environment is installed neither there nor here."""
    return spec.isolated and _own_python(spec.name) is None and importlib.util.find_spec(spec.name) is None


def check_simulators(extensions: Sequence[str] = (), vulkan_draws: bool = True) -> Iterator[MachineFinding]:
    """Check all simulators; frames are rendered with Vulkan only if it is usable."""
    installed = [spec for spec in _checked() if not _is_absent(spec)]
    for spec in installed:
        yield check_simulator(spec.name, extensions, vulkan_draws or spec.draws_with != "vulkan")
    for spec in installed:
        yield from find_warnings(spec.name, _own_python(spec.name))
    if importlib.util.find_spec("mujoco") is not None:
        yield check_mujoco_rendering()


def problems(findings: list[MachineFinding]) -> dict[str, str]:
    """Return env_type -> why it does not run here; "" if it does."""

    def text(*names: str) -> str:
        return "; ".join(f"{f.name}: {f.detail}" for f in findings if f.name in names and f.status != "ok")

    result: dict[str, str] = {}
    for spec in _checked():
        missing = [spec.name] if _is_absent(spec) else missing_packages(spec.name, _own_python(spec.name))
        installation = f"not installed: {', '.join(missing)} ({_install_hint(spec, missing)})" if missing else ""
        result[spec.name] = installation or text(spec.name) or text(*DRAWING.get(spec.draws_with, ()))
    return result


def preflight(env_type: str, python: str | None = None, settings: EnvConfig | None = None) -> None:
    """Refuse an unusable simulator before anything starts. Takes milliseconds, more for another interpreter.

    Args:
        env_type: name in the environment registry.
        python: interpreter of the simulator processes, which may bring its own libraries; None for this one.
        settings: section ``env``, for the probe of the spec.

    Raises:
        MissingDependencyError: a package, a renderer, or a requirement of the probe is missing.
    """
    if env_type not in ENVS:
        return
    require_packages(env_type, python)
    spec = ENVS.entry(env_type)
    found = probe(env_type, settings, python)
    if spec.draws_with == "mujoco" and missing_gl():
        found.append((f"MuJoCo can't draw: {missing_gl()}", GL_HINT))
    if spec.draws_with == "vulkan":
        checks = [] if python is not None else [check_libraries()]
        checks.append(check_vulkan(vulkan.probe_in_subprocess()))
        found += [(f"{check.name}: {check.detail}", check.hint) for check in checks if check.status == "error"]
    if found:
        raise MissingDependencyError(*("; ".join(part) for part in zip(*found, strict=True)))


def require_packages(env_type: str, python: str | None = None, settings: EnvConfig | None = None) -> None:
    """Refuse a simulator whose packages are not installed, without importing them.

    With settings, a simulator with a separate environment must pass the probe of its spec too. Arguments as in
    ``preflight``.

    Raises:
        MissingDependencyError: a package is missing.
    """
    spec = ENVS.entry(env_type)
    missing = missing_packages(env_type, python)
    if missing:
        raise MissingDependencyError(
            f"env.env_type {env_type} needs {', '.join(missing)}, not installed in {python or 'this environment'}",
            f"{_install_hint(spec, missing)}, or set env.python to an interpreter that has it",
        )
    if spec.isolated and settings is not None and (found := probe(env_type, settings, python)):
        raise MissingDependencyError(*("; ".join(part) for part in zip(*found, strict=True)))


def preflight_videos(python: str | None = None) -> None:
    """Refuse videos, before anything starts, if an interpreter (None: this one) can't encode them.

    Raises:
        MissingDependencyError: imageio or its ffmpeg is missing.
    """
    if missing_modules(VIDEO_MODULES, python):
        raise MissingDependencyError(
            f"videos need the packages imageio and imageio-ffmpeg, not installed in {python or 'this environment'}",
            f"{python or 'python'} -m pip install 'imageio[ffmpeg]', or set env.video.enabled=false",
        )
