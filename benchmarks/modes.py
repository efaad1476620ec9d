"""The same run under each mode of docs/backends.md: ``modes.py [--runs DIR] [--json FILE] [MODE ...]``.

Two iterations on ManiSkill, same seed, float32. A mode whose run is in DIR is not run again; one whose package is not
there is passed over, and can be run by another interpreter with the same DIR. The modes on two Ray nodes need
``RAY_ADDRESS=HOST:PORT`` of a Ray with two. Prints the losses beside those of ``native``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hardware import describe_hardware

TWO_ACTORS = "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}"
NODES = ("cluster=ray_local", "cluster.num_nodes=2", "env.pin_cpus=false", "cluster.num_threads=1")
MODES: dict[str, tuple[str, ...]] = {
    "native": ("actor=native",),
    "apart": ("actor=native", "actor.own_process=true"),
    "fsdp": ("actor=fsdp", TWO_ACTORS),
    "tensor_parallel": ("actor=fsdp", "actor.tensor_parallel_size=2", TWO_ACTORS),
    "megatron": ("actor=megatron", TWO_ACTORS),
    "vllm": ("rollout=vllm",),
    "disaggregated": ("actor.own_process=true", "rollout.own_process=true"),
    "two_rollouts": ("cluster.component_placement={actor:0,rollout:'0:0-1',env:0}",),
    "ray": ("cluster=ray_local",),
    "ray_nodes_hybrid": (*NODES, "cluster.component_placement={actor:0,rollout:0-1,env:0-1}"),
    "ray_nodes_disaggregated": (*NODES, "cluster.component_placement={actor:0,rollout:1,env:1}"),
}
PACKAGES = {"megatron": "megatron", "vllm": "vllm", "ray": "ray"}
FIRST = (
    "env=maniskill",
    "model=openvla",
    "runner.max_iterations=2",
    "runner.eval_at_start=false",
    "runner.eval_interval=0",
    "env.train.total_num_envs=16",
    "env.train.max_steps_per_rollout_epoch=50",
    "env.eval.num_episodes=8",
    "actor.precision=fp32",
    "rollout.precision=fp32",
)
LAST = (
    "actor.global_batch_size=80",
    "actor.micro_batch_size=40",
    "actor.optim.critic_warmup_iterations=0",
    "actor.optim.lr_warmup_iterations=1",
)
LOSSES = ("train/policy_loss", "train/value_loss")


def command(mode: str, run_dir: Path) -> list[str]:
    """Return the command line of a mode."""
    address = os.environ.get("RAY_ADDRESS", "")
    nodes = (f"cluster.ray_address={address}",) if mode.startswith("ray_nodes") else ()
    where = ("runner.logger.console=plain", f"runner.output_dir={run_dir}")
    return [sys.executable, "-m", "embodrl", "train", *FIRST, *MODES[mode], *nodes, *LAST, *where]


def missing(mode: str) -> str:
    """Return what a mode lacks here; "" if nothing."""
    package = PACKAGES.get(mode.partition("_")[0])
    if package is not None and importlib.util.find_spec(package) is None:
        return f"no {package} here"
    return "no RAY_ADDRESS" if mode.startswith("ray_nodes") and "RAY_ADDRESS" not in os.environ else ""


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of the iterations of a whole run; [] without one."""
    if not (run_dir / "report.html").is_file():
        return []
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def compare(rows: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the losses of a run, and how far it is from the reference."""
    losses = [[row[name] for name in LOSSES] for row in rows]
    pairs = [(row[name], other[name]) for row, other in zip(rows, reference, strict=True) for name in LOSSES]
    same = [n for n in reference[-1] if n.startswith(("train/", "env_steps"))]
    return {
        "losses": losses,
        "difference": max(abs(mine - theirs) for mine, theirs in pairs),
        "same_to_the_bit": all(r.get(n) == o[n] for r, o in zip(rows, reference, strict=True) for n in same if n in o),
        "env_steps": rows[-1]["env_steps"],
        "iteration_s": rows[-1]["time/total_s"],
    }


def main() -> int:
    """Run what is missing, compare, and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("outputs/modes"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(MODES))
    options = parser.parse_args()
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"no mode {', '.join(sorted(unknown))}; known: {', '.join(MODES)}")
    for mode in options.modes or MODES:
        run_dir = options.runs / mode
        if rows_of(run_dir):
            continue
        if lack := missing(mode):
            print(f"{mode}: passed over, {lack}", flush=True)
            continue
        shutil.rmtree(run_dir, ignore_errors=True)
        print(f"{mode}: {' '.join(MODES[mode])}", flush=True)
        subprocess.run(command(mode, run_dir), check=True, stdout=subprocess.DEVNULL)
    reference = rows_of(options.runs / "native")
    if not reference:
        parser.error("there is no run of native to compare with")
    found = {mode: compare(rows, reference) for mode in MODES if (rows := rows_of(options.runs / mode))}
    for mode, facts in found.items():
        losses = "; ".join(", ".join(f"{loss:.6f}" for loss in pair) for pair in facts["losses"])
        exact = "bit-exact" if facts["same_to_the_bit"] else f"{facts['difference']:.1e}"
        print(f"{mode:24} {losses}  difference {exact}")
    if options.json is not None:
        result = {"command": ["embodrl", "train", *FIRST, "MODE", *LAST], "modes": MODES, "found": found}
        options.json.write_text(json.dumps({**result, "hardware": describe_hardware()}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
