"""The runs of one model family through the command line, one after the other in one process, which torch enters once.

``python family_runs.py FAMILY DIRECTORY corners|push DEMOS`` writes what it found to DIRECTORY/result.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.config.schema import model_settings
from embodrl.specs import MODELS

VIT = "width: 48, num_heads: 2, mlp_dim: 96"
PICTURE = "image_size: 32, patch_size: 8"
LANGUAGE = "hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2"
SIZES = {
    "architecture": f"{{{PICTURE}, dino: {{{VIT}, depth: 3}}, siglip: {{{VIT}, depth: 3}}, {LANGUAGE}}}",
    "pi": f"{{{PICTURE}, siglip: {{{VIT}, depth: 2}}, depth: 2, num_heads: 2, vlm_width: 64, vlm_mlp_dim: 128,"
    " expert_width: 48, expert_mlp_dim: 96}",
    "smolvla": f"{{{PICTURE}, siglip: {{{VIT}, depth: 2}}, depth: 2, num_heads: 2, num_kv_heads: 1, vlm_width: 64,"
    " vlm_mlp_dim: 128, expert_width: 48, expert_mlp_dim: 96}",
    "pi0_fast": f"{{{PICTURE}, siglip: {{{VIT}, depth: 2}}, depth: 2, num_heads: 2, vlm_width: 64, vlm_mlp_dim: 128}}",
    "gr00t": f"{{{PICTURE}, siglip: {{{VIT}, depth: 2}}, {LANGUAGE}, num_key_value_heads: 1, dit_num_heads: 2,"
    " dit_output_dim: 48, vl_num_heads: 2}",
    "gr00t_n1_7": f"{{{PICTURE}, vision: {{{VIT}, depth: 2}}, {LANGUAGE}, num_key_value_heads: 1, dit_num_heads: 2,"
    " dit_output_dim: 48, vl_num_heads: 2}",
}
# Steps after which each family tells four colours apart, and has halved its loss on PushCube; learning rate.
LEARNING = {
    "openvla": (120, 120, 1e-3),
    "openvla_oft": (200, 120, 1e-3),
    "pi0": (300, 300, 2e-3),
    "pi05": (200, 120, 2e-3),
    "pi0_fast": (300, 200, 2e-3),
    "gr00t": (120, 120, 1e-3),
    "gr00t_n1_7": (120, 120, 1e-3),
    "smolvla": (300, 200, 2e-3),
}
COMMON = [
    "env.pin_cpus=false",
    "env.cameras=[{height: 32, width: 32, fov_rad: 1.0}]",
    "model.num_action_chunks=2",
    "model.warm_start=null",
    "model.value_head.hidden_sizes=[16]",
    "cluster.num_threads=2",
    "runner.logger.console=plain",
    "runner.logger.tensorboard=false",
]
CORNERS = ["env=toy", "env.env_type=corners", "extensions=[corners]", "env.max_episode_steps=12"]
PUSH = ["env=maniskill", "env.render_backend=cpu"]
PPO = [
    "env=toy",
    "env.max_episode_steps=6",
    "env.train.total_num_envs=4",
    "env.train.max_steps_per_rollout_epoch=12",
    "actor.global_batch_size=8",
    "actor.micro_batch_size=4",
    "actor.optim.critic_warmup_iterations=0",
    "actor.optim.lr_warmup_iterations=0",
    "runner.max_iterations=3",
    "runner.eval_interval=0",
    "runner.eval_at_start=false",
    "runner.save_interval=3",
]


def embodrl(*arguments: str) -> None:
    """Run a verb; it must succeed."""
    outcome = CliRunner().invoke(app, list(arguments))
    if outcome.exit_code != 0:
        raise RuntimeError(f"embodrl {' '.join(arguments)}: {outcome.exit_code}\n{outcome.output}\n{outcome.exception}")


def losses(directory: Path) -> list[float]:
    """Return the losses that imitation logged."""
    return [json.loads(line)["loss"] for line in (directory / "sft_metrics.jsonl").read_text().splitlines()]


def imitate(settings: list[str], demos: Path, directory: Path, steps: int, lr: float) -> list[float]:
    """Run `embodrl sft` and return its losses."""
    embodrl(
        "sft",
        *settings,
        f"sft.data_dir={demos}",
        f"sft.output_dir={directory}",
        f"sft.max_steps={steps}",
        f"sft.lr={lr}",
        "sft.batch_size=32",
        "sft.lr_warmup_steps=20",
        "sft.label_smoothing_bins=0",
        "sft.log_interval=10",
    )
    return losses(directory)


def success_rate(settings: list[str], path: Path) -> float:
    """Run `embodrl eval` and return the success rate."""
    embodrl("eval", *settings, "env.eval.num_episodes=32", "env.eval.decoding=greedy", "--json", str(path))
    return json.loads(path.read_text())["success_rate"]


def train(settings: list[str], policy: Path, run_dir: Path) -> dict[str, object]:
    """Run `embodrl train` from a policy; return its metrics and how far each of its weights moved."""
    embodrl("train", *settings, *PPO, f"model.warm_start={policy}", f"runner.output_dir={run_dir}")
    before, after = (weights(directory) for directory in (policy, run_dir / "policy"))
    moved = {name: float((after[name] - before[name]).abs().max()) for name in after if name in before}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {"rows": rows, "moved": moved, "names_agree": before.keys() <= after.keys()}


def weights(directory: Path) -> dict[str, object]:
    """Return all weights of a policy, with the heads that embodrl adds."""
    return {
        f"{path.stem}.{name}": value.float()
        for path in sorted(directory.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def corners_and_ppo(family: str, directory: Path, demos: Path) -> dict[str, object]:
    """Imitate on the environment of corners, and continue with PPO on the toy; return what was measured."""
    spec = MODELS.entry(family)
    model = settings_of(family)
    corners = [*CORNERS, *model]
    result: dict[str, object] = {"untrained": success_rate(corners, directory / "untrained.json")}
    steps, _, lr = LEARNING[family]
    result["corner_losses"] = imitate(corners, demos, directory / "corners", steps, lr)
    policy = directory / "corners" / "policy"
    result["trained"] = success_rate([*corners, f"model.warm_start={policy}"], directory / "trained.json")
    methods = ("flow_sde", "flow_noise") if spec.kind == "flow" else ("tokens",)
    for method in methods:
        flow = [f"model.flow.method={method}"] if spec.kind == "flow" else []
        result[method] = train([*model, *flow], policy, directory / method)
    return result


def push(family: str, directory: Path, demos: Path) -> dict[str, object]:
    """Imitate on PushCube; return the losses."""
    _, steps, lr = LEARNING[family]
    return {"push_losses": imitate([*PUSH, *settings_of(family)], demos, directory / "push", steps, lr)}


def settings_of(family: str) -> list[str]:
    """Return the settings of a small policy."""
    parts = model_settings(family).model_fields
    model = [f"model={family}", *COMMON, *(f"model.{name}={size}" for name, size in SIZES.items() if name in parts)]
    uses_state = MODELS.entry(family).uses_state is True
    return [*model, f"env.include_state={str(uses_state).lower()}"]


def main() -> None:
    """Run what is asked for and write the result."""
    family, directory, what, demos = sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    result = (push if what == "push" else corners_and_ppo)(family, directory, demos)
    (directory / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
