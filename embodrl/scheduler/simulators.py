"""Whether a simulator other than ManiSkill can run here: its packages, and a way to draw. Imports none of them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from embodrl.envs.mujoco_scene import GL_LIBRARIES, GL_REMEDY, loads
from embodrl.errors import MissingDependencyError
from embodrl.registry import ENVS
from embodrl.scheduler.findings import Finding

RENDER_TIMEOUT_S = 120.0
DRAW = """
import json
from embodrl.envs.mujoco_scene import choose_gl, draws_in_software
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


def missing_packages(env_type: str) -> list[str]:
    """Return the modules that an environment needs and this interpreter has not."""
    needs: tuple[str, ...] = ENVS.entry(env_type).facts.get("needs", ()) if env_type in ENVS else ()
    return [name for name in needs if importlib.util.find_spec(name) is None]


def check_packages(env_type: str) -> Finding:
    """The packages of a simulator; that they are absent is no error, as nobody has to have it."""
    facts, missing = ENVS.entry(env_type).facts, missing_packages(env_type)
    if missing:
        detail = f"not installed: {', '.join(missing)}; for env={env_type} only"
        return Finding(env_type, "ok", detail, f"pip install 'embodrl[{facts['extra']}]'")
    return Finding(env_type, "ok", "all packages are there")


def missing_gl() -> str:
    """Return what keeps MuJoCo from drawing, as far as files tell; "" for nothing."""
    if os.environ.get("MUJOCO_GL") or any(map(loads, GL_LIBRARIES.values())):
        return ""
    return "neither libEGL nor libOSMesa can be loaded"


def check_mujoco_rendering(timeout_s: float = RENDER_TIMEOUT_S) -> Finding:
    """One frame of MuJoCo, in a process of its own: a faulty driver may crash or hang."""
    name, remedy = "MuJoCo rendering", GL_REMEDY
    if missing_gl():
        return Finding(name, "warning", missing_gl(), remedy)
    try:
        done = subprocess.run(
            [sys.executable, "-c", DRAW], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "warning", f"no frame within {timeout_s:g} s", remedy)
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:  # the status does not count: some drivers complain when the interpreter ends
        lines = done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"]
        return Finding(name, "warning", lines[-1], remedy)
    answer: dict[str, Any] = json.loads(answers[-1])
    if answer["contrast"] == 0:
        return Finding(name, "warning", f"MUJOCO_GL={answer['gl']} draws an empty picture", remedy)
    return Finding(name, "ok", f"MUJOCO_GL={answer['gl']}, on the {'CPU' if answer['software'] else 'GPU'}")


def check_others() -> list[Finding]:
    """Run the checks of all simulators but ManiSkill."""
    findings = [check_packages(name) for name in ("metaworld", "gymnasium")]
    if importlib.util.find_spec("mujoco") is not None:
        findings.append(check_mujoco_rendering())
    return findings


def troubles(findings: list[Finding]) -> dict[str, str]:
    """Return env_type -> why it does not run here; "" if it does."""
    drawing = "; ".join(f"{f.name}: {f.detail}" for f in findings if f.name == "MuJoCo rendering" and f.status != "ok")
    result: dict[str, str] = {}
    for name in ("metaworld", "gymnasium"):
        missing = missing_packages(name)
        text = f"not installed: {', '.join(missing)} (pip install 'embodrl[{ENVS.entry(name).facts['extra']}]')"
        result[name] = text if missing else drawing if name == "metaworld" else ""
    return result


def preflight(env_type: str) -> None:
    """Refuse a simulator before anything is started. Takes some milliseconds.

    Raises:
        MissingDependencyError: a package, or for Meta-World a way to draw, is missing.
    """
    missing = missing_packages(env_type)
    if missing:
        raise MissingDependencyError(
            f"env.env_type {env_type} needs {', '.join(missing)}, which is not installed here",
            f"pip install 'embodrl[{ENVS.entry(env_type).facts['extra']}]', or set env.python to an interpreter that"
            " has it",
        )
    if env_type == "metaworld" and missing_gl():
        raise MissingDependencyError(f"MuJoCo can't draw: {missing_gl()}", GL_REMEDY)
