"""The verb `embodrl doctor`."""

from __future__ import annotations

from embodrl.specs import VerbSpec

VERB = VerbSpec(
    name="doctor",
    target="embodrl.tools.doctor.cli:doctor",
    description="Check this machine: packages, Vulkan driver, GPU, disk. Exits 0 if training can run, else 1.",
)
