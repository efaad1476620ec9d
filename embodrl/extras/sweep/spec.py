"""The verb `embodrl sweep`, and how `embodrl resume` continues one."""

from __future__ import annotations

from embodrl.specs import VerbSpec

SWEEP_FILE = "sweep.json"
VERB = VerbSpec(
    name="sweep",
    target="embodrl.extras.sweep.cli:sweep",
    resumes={SWEEP_FILE: "embodrl.extras.sweep.cli:resume"},
)
