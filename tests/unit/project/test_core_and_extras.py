"""The core and its extras."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LISTED = """
import sys
from embodrl.cli.main import app
from embodrl.pipelines.load import load_config
loaded = load_config(["env=maniskill", "model=openvla"], verb="train")
from embodrl.runs import train
from embodrl.envs.registry import SupportedEnv
from embodrl.models.openvla import build
from embodrl.hybrid_engines.training import native
from embodrl.hybrid_engines.rollout import native as acting
print([name for name in sys.modules if name.startswith("embodrl.extras")])
"""


def test_the_front_pages_run_loads_no_extra() -> None:
    done = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_every_extra_is_found_by_an_entry_point() -> None:
    root = Path(__file__).parents[3]
    points = (root / "pyproject.toml").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (root / "embodrl" / "extras").glob("*/__init__.py")}
    features = folders - {"wire", "mujoco"}  # what several of them share
    assert features and all(f"embodrl.extras.{name}." in points for name in features)
