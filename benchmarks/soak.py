"""``make soak``: a long run under random faults. ``python benchmarks/soak.py --help`` shows the options."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from embodrl.bench.soak import Plan, main


def plan() -> Plan:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description="Train for a long time while processes are killed at random.")
    parser.add_argument("--minutes", type=float, default=120.0, help="how long")
    parser.add_argument("--fault-every-s", type=float, default=20.0, help="mean time between two faults of simulators")
    parser.add_argument("--kill-training-every-s", type=float, default=0.0, help="0: the training process lives")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--output", type=Path, help="new directory; by default outputs/soak-<date and time>")
    parser.add_argument("settings", nargs="*", default=["env=toy"], help="of `embodrl train`, such as env=maniskill")
    given = parser.parse_args()
    output = given.output or Path("outputs") / time.strftime("soak-%Y%m%d-%H%M%S")
    if output.exists():
        parser.error(f"{output} is there already; name a new directory")
    settings = tuple(given.settings)
    return Plan(
        given.minutes, output.absolute(), settings, given.fault_every_s, given.kill_training_every_s, given.seed
    )


if __name__ == "__main__":
    sys.exit(main(plan()))
