"""Whether a simulator other than ManiSkill can run: its packages, and a way to draw. Imports none of them.

A simulator is proved by making one environment and drawing one frame, in the interpreter that would run it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from embodrl.config.schema import EnvConfig
from embodrl.envs.mujoco.scene import GL_HINT, GL_LIBRARIES, loads
from embodrl.envs.pool.manager import EnvManager, EnvTimeouts
from embodrl.errors import EmbodrlError, EnvError, EnvRaised, EnvTimeout, EnvWorkerDied, MissingDependencyError
from embodrl.names import exits_named, import_function
from embodrl.preflight.findings import Finding
from embodrl.specs import ENVS

RENDER_TIMEOUT_S = 120.0
FRAME_TIMEOUTS = EnvTimeouts(300.0, 300.0, 300.0)
CAMERA: dict[str, object] = {"name": "camera", "height": 64, "width": 64, "fov_rad": None, "eye": None, "target": None}
EXAMPLES: dict[str, dict[str, object]] = {
    "metaworld": {"tasks": ["reach-v3"], "cameras": [{**CAMERA, "name": "corner2"}]},
    "gymnasium": {"tasks": ["task"], "id": "Reacher-v5", "instruction": "reach", "cameras": [CAMERA]},
}
"""Arguments of an environment of each, which `embodrl doctor` makes where the packages are there."""
VIDEO_MODULES = ("imageio", "imageio_ffmpeg")
FIND_MODULES = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"
DRAW = """
import json
from embodrl.envs.mujoco.scene import choose_gl, draws_in_software
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


def ask(python: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a piece of code in an interpreter, which sees what a simulator process there would see.

    Raises:
        OSError: it can't be started.
        subprocess.TimeoutExpired: it hangs.
    """
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    command = [python, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)


def missing_packages(env_type: str, python: str | None = None) -> list[str]:
    """Return the modules that an environment needs and an interpreter (None: this one) has not.

    Raises:
        MissingDependencyError: the interpreter can't be run.
    """
    needs = ENVS.entry(env_type).needs if env_type in ENVS else ()
    # The simulator processes themselves need numpy, which an interpreter named by the user may lack.
    return missing_modules((*needs, "numpy") if python is not None else needs, python)


def missing_modules(names: Sequence[str], python: str | None = None) -> list[str]:
    """Return those of the modules that an interpreter (None: this one) has not.

    Raises:
        MissingDependencyError: the interpreter can't be run.
    """
    if python is None:
        return [name for name in names if importlib.util.find_spec(name) is None]
    hint = "set env.python to the interpreter of a virtual environment that has the simulator"
    try:
        done = ask(python, FIND_MODULES, *names)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependencyError(f"env.python {python} can't be run: {error}", hint) from error
    if done.returncode != 0:
        raise MissingDependencyError(f"env.python {python} can't be run: {done.stderr.strip()[-200:]}", hint)
    return done.stdout.split()


def check_simulator(env_type: str, extensions: Sequence[str] = ()) -> Finding:
    """The packages, the probe and one frame of a simulator; it is optional, so nothing missing is an error.

    Args:
        env_type: a name of the environment registry.
        extensions: modules that register environments.
    """
    spec, missing = ENVS.entry(env_type), missing_packages(env_type)
    if missing:
        detail = f"not installed: {', '.join(missing)}; for env={env_type} only"
        return Finding(env_type, "ok", detail, _install_hint(env_type, missing))
    found = probe(env_type)
    if found:
        message, hint = ("; ".join(part) for part in zip(*found, strict=True))
        return Finding(env_type, "warning", message, hint)
    example = EXAMPLES.get(env_type, spec.example)
    if example is None:
        return Finding(env_type, "ok", "its own probe finds nothing missing")
    return optional(draw_frame(env_type, env_type, example, extensions=extensions))


def probe(env_type: str, settings: EnvConfig | None = None, python: str | None = None) -> list[tuple[str, str]]:
    """Return what the probe of a spec finds missing, with hints; nothing where it has none.

    Raises:
        EmbodrlError: the probe failed.
    """
    called = ENVS.entry(env_type).probe
    if called is None:
        return []
    try:
        found = import_function(called) if isinstance(called, str) else called
        with exits_named(f"the probe of '{env_type}'"):
            return [(str(message), str(hint)) for message, hint in found(settings, python)]
    except EmbodrlError:
        raise
    except Exception as error:  # a custom probe may raise anything
        raise EmbodrlError(
            f"the probe of '{env_type}' raised {type(error).__name__}: {error}",
            "it is called with the section env (or None) and an interpreter (or None), and returns pairs of text",
            code="spec-probe-raised",
        ) from error


def _install_hint(env_type: str, missing: Sequence[str]) -> str:
    extra = ENVS.entry(env_type).extra  # a custom environment has none
    return f"pip install 'embodrl[{extra}]'" if extra else f"install {', '.join(missing)}"


def optional(found: Finding) -> Finding:
    """Turn an error into a warning: training can run without a simulator that it does not use."""
    return replace(found, status="warning") if found.status == "error" else found


def draw_frame(
    name: str,
    env_type: str,
    kwargs: Mapping[str, object],
    python: str | None = None,
    extensions: Sequence[str] = (),
    hint: str = "",
) -> Finding:
    """Make one environment, reset it and draw one frame, in a process of its own.

    Args:
        name: of the finding.
        env_type: a name of the environment registry.
        kwargs: of the VectorEnv, without ``num_envs``.
        python: the interpreter; None is this one.
        extensions: modules that register environments.
        hint: where the error has none.
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
    except (EnvWorkerDied, EnvTimeout) as error:  # what follows is the tail of a log, and the limits are doctor's own
        return Finding(name, "error", error.message.partition("\n")[0], hint or error.hint)
    except EnvError as error:
        lines = [line.strip() for line in error.message.splitlines() if line.strip() and not line.startswith("---")]
        # What a simulator raises ends with its hint.
        what = next((line for line in reversed(lines) if not line.startswith("hint:")), lines[-1])
        what = re.sub(r"^(\w+\.)+\w+: ", "", what)  # the class of an error says nothing to a user
        # A bare exception has only a hint for those who write simulators.
        raised_by_simulator = error.code == EnvRaised.code and hint
        return Finding(name, "error", what, hint if raised_by_simulator else error.hint or hint)
    if contrast == 0:
        other = "try another Vulkan driver" if env_type == "maniskill" else "try MUJOCO_GL=osmesa, or another driver"
        return Finding(name, "error", "it draws an empty picture", other)
    seconds = time.monotonic() - start
    return Finding(name, "ok", f"one environment and one frame in {seconds:.1f} s ({python or 'this environment'})")


def missing_gl() -> str:
    """Return what keeps MuJoCo from drawing, as far as files tell; "" for nothing."""
    if os.environ.get("MUJOCO_GL") or any(map(loads, GL_LIBRARIES.values())):
        return ""
    return "neither libEGL nor libOSMesa can be loaded"


def check_mujoco_rendering(timeout_s: float = RENDER_TIMEOUT_S) -> Finding:
    """One frame of MuJoCo, in a process of its own: a faulty driver may crash or hang."""
    name, hint = "MuJoCo rendering", GL_HINT
    if missing_gl():
        return Finding(name, "warning", missing_gl(), hint)
    try:
        done = subprocess.run(
            [sys.executable, "-c", DRAW], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "warning", f"no frame within {timeout_s:g} s", hint)
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:  # the status does not count: some drivers complain when the interpreter ends
        lines = done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"]
        return Finding(name, "warning", lines[-1], hint)
    answer: dict[str, object] = json.loads(answers[-1])
    if answer["contrast"] == 0:
        return Finding(name, "warning", f"MUJOCO_GL={answer['gl']} draws an empty picture", hint)
    return Finding(name, "ok", f"MUJOCO_GL={answer['gl']}, on the {'CPU' if answer['software'] else 'GPU'}")


def check_others(extensions: Sequence[str] = ()) -> list[Finding]:
    """Run the checks of all simulators but ManiSkill and LIBERO: those with an example or a probe in their spec."""
    custom = [spec.name for spec in ENVS.all() if spec.name not in ENVS.builtin and (spec.probe or spec.example)]
    findings = [check_simulator(name, extensions) for name in (*EXAMPLES, *custom)]
    if importlib.util.find_spec("mujoco") is not None:
        findings.append(check_mujoco_rendering())
    return findings


def troubles(findings: list[Finding]) -> dict[str, str]:
    """Return env_type -> why it does not run here; "" if it does."""
    drawing = "; ".join(f"{f.name}: {f.detail}" for f in findings if f.name == "MuJoCo rendering" and f.status != "ok")
    result: dict[str, str] = {}
    for name in EXAMPLES:
        missing = missing_packages(name)
        text = f"not installed: {', '.join(missing)} (pip install 'embodrl[{ENVS.entry(name).extra}]')"
        frame = "; ".join(f"{f.name}: {f.detail}" for f in findings if f.name == name and f.status != "ok")
        result[name] = text if missing else frame or (drawing if name == "metaworld" else "")
    return result


def preflight(env_type: str, python: str | None = None, settings: EnvConfig | None = None) -> None:
    """Refuse a simulator before anything is started. Takes some milliseconds, more for another interpreter.

    Args:
        env_type: a name of the environment registry.
        python: interpreter of the simulator processes; None for this one.
        settings: the section ``env``, for the probe of the spec.

    Raises:
        MissingDependencyError: a package, a way to draw, or what the probe of the spec looks for is missing.
    """
    missing = missing_packages(env_type, python)
    if missing:
        install = _install_hint(env_type, missing)
        raise MissingDependencyError(
            f"env.env_type {env_type} needs {', '.join(missing)}, which {python or 'this environment'} has not",
            f"{install}, or set env.python to an interpreter that has it",
        )
    spec = ENVS.entry(env_type) if env_type in ENVS else None
    if spec is not None and spec.draws_with == "mujoco" and missing_gl():
        raise MissingDependencyError(f"MuJoCo can't draw: {missing_gl()}", GL_HINT)
    found = probe(env_type, settings, python) if spec is not None else []
    if found:
        raise MissingDependencyError(*("; ".join(part) for part in zip(*found, strict=True)))


def preflight_videos(python: str | None = None) -> None:
    """Refuse videos, before anything is started, where an interpreter (None: this one) can't encode them.

    Raises:
        MissingDependencyError: imageio or its ffmpeg is missing.
    """
    if missing_modules(VIDEO_MODULES, python):
        raise MissingDependencyError(
            f"videos need the packages imageio and imageio-ffmpeg, which {python or 'this environment'} has not",
            f"{python or 'python'} -m pip install 'imageio[ffmpeg]', or set env.video.enabled=false",
        )
