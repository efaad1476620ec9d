"""The verb `embodrl sweep`, and how `embodrl resume` continues one."""

from __future__ import annotations

from embodrl.specs import VerbSpec

SWEEP_FILE = "sweep.json"
VERB = VerbSpec(
    name="sweep",
    target="embodrl.tools.sweep.cli:sweep",
    description="Train with every combination of settings with several values.",
    resumes={SWEEP_FILE: "embodrl.tools.sweep.cli:resume"},
)
