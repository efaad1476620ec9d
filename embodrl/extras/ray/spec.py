"""Ray as a launcher."""

from __future__ import annotations

from embodrl.registry import Entry

LAUNCHER = Entry(
    name="ray", target="embodrl.extras.ray.launcher:RayLauncher", description="Ray actors, on several machines"
)
