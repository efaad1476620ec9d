"""Imitation in ManiSkill, every model family at its tiny preset: loss and success before and after.

``python benchmarks/families.py [FILE.json] [DIRECTORY]``, about twenty minutes on two cores. What is in DIRECTORY
(outputs/families) already is not done again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hardware import describe_hardware

from embodrl.specs import MODELS

NUM_DEMOS = 400
STEPS = 600
NUM_EPISODES = 64


def embodrl(*arguments: str) -> None:
    """Run a verb, with its output shown."""
    subprocess.run([sys.executable, "-m", "embodrl", *arguments], check=True)


def success_rate(settings: list[str], path: Path) -> float:
    """Return the success rate of a policy on fixed seeds."""
    if not path.is_file():
        embodrl(
            "eval", *settings, f"env.eval.num_episodes={NUM_EPISODES}", "env.video.enabled=false", "--json", str(path)
        )
    return json.loads(path.read_text())["success_rate"]


def measure(family: str, directory: Path) -> dict[str, Any]:
    """Return what imitation did to a family."""
    out = directory / family
    spec = MODELS.entry(family)
    settings = ["env=maniskill", f"model={family}", "model.warm_start=null"]
    settings += ["env.include_state=true"] if spec.uses_state is True else []
    untrained = success_rate(settings, out / "untrained.json")
    if not (out / "sft" / "policy").is_dir():
        options = [
            f"sft.data_dir={directory / 'demos'}",
            f"sft.output_dir={out / 'sft'}",
            f"sft.max_steps={STEPS}",
            "sft.lr=6e-4",
        ]
        # Smoothed targets have an entropy of their own, below which the loss can't fall.
        options += ["sft.label_smoothing_bins=0"] if spec.kind == "tokens" else []
        embodrl("sft", *settings, *options)
    rows = [json.loads(line) for line in (out / "sft" / "sft_metrics.jsonl").read_text().splitlines()]
    trained = success_rate([*settings, f"model.warm_start={out / 'sft' / 'policy'}"], out / "trained.json")
    return {
        "steps": rows[-1]["step"],
        "seconds": round(rows[-1]["time_s"]),
        "first_loss": rows[0]["loss"],
        "last_loss": sum(row["loss"] for row in rows[-4:]) / len(rows[-4:]),
        "untrained_success": untrained,
        "trained_success": trained,
    }


def main() -> int:
    """Measure every family, print a table, and write the figures if a file is given."""
    directory = Path(sys.argv[2] if len(sys.argv) > 2 else "outputs/families")
    if not (directory / "demos" / "index.json").is_file():
        options = ["env.include_state=true", f"collect.num_episodes={NUM_DEMOS}", "collect.format=raw"]
        embodrl("collect", "env=maniskill", "model=pi0", *options, f"collect.output_dir={directory / 'demos'}")
    families = {family: measure(family, directory) for family in MODELS}
    result = {"task": "PushCube-v1", "demonstrations": NUM_DEMOS, "episodes": NUM_EPISODES, "families": families}
    print(f"{'family':<12} {'steps':>6} {'seconds':>8} {'loss':>14} {'success':>16}")
    for family, row in families.items():
        loss = f"{row['first_loss']:.2f} -> {row['last_loss']:.2f}"
        success = f"{row['untrained_success']:.0%} -> {row['trained_success']:.0%}"
        print(f"{family:<12} {row['steps']:>6} {row['seconds']:>8} {loss:>14} {success:>16}")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(result | {"hardware": describe_hardware()}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
