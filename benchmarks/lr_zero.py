"""What an update does at a learning rate of 0: ``lr_zero.py [--json FILE] [--engine native|vllm] [FAMILY ...]``.

Every family at its tiny size with the shipped or random weights acts on random pictures, and one update with a learning
rate of 1e-30 evaluates the same actions. What is clipped, and what differs, is the engine's and the precision's doing.
Sampled actions of token models are drawn at a temperature of 0.3. With vLLM, OpenVLA also acts with low-rank
adapters, which vLLM gets merged into its weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from hardware import describe_hardware
from inference import make_observation

from embodrl.algorithms.advantages import Advantages
from embodrl.algorithms.decoupled import set_proximal
from embodrl.config.schema import ActorConfig, AlgorithmConfig, Config, OptimConfig, RolloutConfig, model_settings
from embodrl.data.trajectory import TrajectoryBatch
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.hybrid_engines.rollout.vllm.engine import VllmRolloutEngine
from embodrl.hybrid_engines.training.native import NativeTrainEngine
from embodrl.hybrid_engines.training.options import EngineOptions
from embodrl.hybrid_engines.training.precision import autocast
from embodrl.learners.on_policy import OnPolicyUpdate
from embodrl.models.base import VLAPolicy
from embodrl.models.registry import build_policy
from embodrl.specs import MODELS
from embodrl.types import PolicyOutput, SamplingParams

PRECISIONS: dict[str, tuple[Literal["fp32", "bf16"], torch.dtype]] = {
    "float32": ("fp32", torch.float32),
    "bf16 autocast": ("bf16", torch.float32),
    "bf16 weights": ("bf16", torch.bfloat16),
}
STEPS, ENVS = 4, 16
ADAPTER_STD = 1e-4
"""Of the product of two factors, as after some hundred updates of weights of std 0.02."""
STILL = OptimConfig(lr=1e-30, value_lr=1e-30, critic_warmup_iterations=0, lr_warmup_iterations=0)
METRICS = ("clip_fraction", "approx_kl", "logprob_mismatch", "logprob_mismatch_max")
COLUMNS = ("clip fraction", "approx. KL", "mean difference", "largest difference")


@torch.no_grad()
def act(
    policy: VLAPolicy, family: str, precision: str, sampling: SamplingParams, engine: RolloutEngine | None
) -> TrajectoryBatch:
    """Return a rollout of random pictures, a batch of environments at a time as a run does."""
    outputs: list[PolicyOutput] = []
    generator = torch.Generator().manual_seed(0)
    everything = make_observation(family, False, STEPS * ENVS)
    for step in range(STEPS):
        rows = everything.select(np.arange(step * ENVS, (step + 1) * ENVS))
        if engine is not None:
            outputs.append(engine.act(rows, compute_values=False))
            continue
        with autocast("bf16" if precision == "bf16" else "fp32", "cpu"):
            outputs.append(policy.predict_action_batch(rows, "train", sampling, generator, compute_values=False))
    logprobs = torch.stack([output.logprobs.float() for output in outputs])
    valid = torch.ones(STEPS, ENVS, logprobs.shape[2], dtype=torch.bool)
    values = torch.zeros(STEPS + 1, ENVS, 1)
    nothing = torch.zeros(STEPS, ENVS, dtype=torch.int64)
    names = outputs[0].forward_inputs
    inputs = {name: torch.stack([output.forward_inputs[name] for output in outputs]) for name in names}
    return TrajectoryBatch.from_rollout(
        forward_inputs=inputs,
        logprobs=logprobs,
        values=values,
        rewards=torch.zeros(valid.shape),
        valid=valid,
        terminated=torch.zeros_like(valid),
        truncated=torch.zeros_like(valid),
        bootstrap_values=torch.zeros(STEPS, ENVS, 1),
        policy_version=nothing,
        task_id=nothing,
    )


def measure(family: str, name: str, recompute: bool, vllm: bool = False, adapters: bool = False) -> dict[str, float]:
    """Return the metrics of an update that changes nothing."""
    precision, dtype = PRECISIONS[name]
    start = "builtin" if MODELS.entry(family).builtin_warm_start else None
    settings = {"model_type": family, "warm_start": start, "add_value_head": False}
    settings["trainable"] = "lora" if adapters else "all"
    policy, _ = build_policy(model_settings(family).model_validate(settings), device="cpu", dtype=dtype, seed=0)
    for parameter_name, parameter in policy.named_parameters():
        if "lora_B" in parameter_name:
            factor = next(p for n, p in policy.named_parameters() if n == parameter_name.replace("lora_B", "lora_A"))
            std = ADAPTER_STD / float(factor.detach().norm(dim=0).mean())
            torch.nn.init.normal_(parameter, std=std, generator=torch.Generator().manual_seed(3))
    algorithm = AlgorithmConfig(loss_type="actor", adv_type="grpo", update_epoch=1, group_size=2)
    actor = ActorConfig(global_batch_size=32, micro_batch_size=8, precision=precision, optim=STILL)
    engine = NativeTrainEngine(policy.eval(), EngineOptions(actor, 10), "cpu")
    updates = OnPolicyUpdate(engine, Config().model_copy(update={"algorithm": algorithm}))
    sampling = SamplingParams(algorithm.sampling.temperature, algorithm.sampling.top_k)
    rollout = RolloutConfig(precision=precision)
    acting = VllmRolloutEngine(policy, rollout, algorithm.sampling, 0) if vllm else None
    batch = act(policy, family, precision, sampling, acting)
    if recompute:
        set_proximal(batch, *updates.proximal(batch, every_chunk=True))
    draws = torch.randn(STEPS, ENVS, 1, generator=torch.Generator().manual_seed(1))
    advantages = Advantages(draws, draws, torch.ones_like(draws, dtype=torch.bool))
    metrics = updates.update(batch, advantages, torch.Generator().manual_seed(2))
    return {key: metrics[f"train/{key}"] for key in METRICS}


def table(rows: list[dict[str, object]]) -> str:
    """Return the results as a table in Markdown."""
    lines = [
        "| family | precision | log-probs | " + " | ".join(COLUMNS) + " |",
        "|---|---|---|" + "---|" * len(COLUMNS),
    ]
    for row in rows:
        figures = [f"{row[key]:.2g}" if row[key] else "0" for key in METRICS]
        lines.append(f"| {row['family']} | {row['precision']} | {row['logprobs']} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure every family, precision and choice of log-probs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    with_network = [name for name in MODELS.builtin if MODELS.entry(name).trainable is not None]
    parser.add_argument("families", nargs="*", default=with_network, metavar="FAMILY")
    parser.add_argument("--engine", choices=["native", "vllm"], default="native", help="vllm: of openvla alone")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    vllm = arguments.engine == "vllm"
    cases = [(family, False) for family in arguments.families] if not vllm else [("openvla", False), ("openvla", True)]
    for family, adapters in cases:
        for precision in PRECISIONS:
            for recompute in (False, True):
                which = "recomputed" if recompute else "of the rollout"
                found = measure(family, precision, recompute, vllm, adapters)
                named = f"{family}, adapters" if adapters else family
                rows.append({"family": named, "precision": precision, "logprobs": which, **found})
                print(rows[-1], flush=True)
    print(table(rows))
    if arguments.json:
        content = {"hardware": describe_hardware(), "engine": arguments.engine, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
