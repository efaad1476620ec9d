"""One of two controllers that update once, of which only the first has rows to train on; it writes what comes of it."""

import sys

import torch
from safetensors.torch import save_file
from tiny_training import deployment_of, tiny_rollout, training_config

from embodrl.algorithms.advantages import compute_advantages
from embodrl.hybrid_engines.controllers import joined
from embodrl.learners.shared_update import UPDATE
from embodrl.workers.actor import make_shared_engine
from embodrl.workers.policy import build_policy

FAMILY = "gaussian"

if __name__ == "__main__":
    out, backend = sys.argv[1:]
    optim = {"critic_warmup_iterations": 0, "lr_warmup_iterations": 0, "lr": 1e-3}
    config = training_config(
        FAMILY,
        actor={"training_backend": backend, "optim": optim},
        algorithm={"kl": {"coef": 0.1}},
        cluster={"controllers": 2},
    )
    with joined(config, torch.device("cpu")) as controllers:
        policy = build_policy(config)
        engine = make_shared_engine(config, deployment_of(config), policy, controllers)
        update = engine.attach(UPDATE, config)
        batch = tiny_rollout(FAMILY, policy, config, seed=0)
        if controllers.rank:
            batch.valid.fill_(value=False)
        batch.ref_logprobs = update.reference_logprobs(batch)
        advantages = compute_advantages(batch, config.algorithm, controllers)
        metrics = update.update(batch, advantages, torch.Generator().manual_seed(0))
        tensors = engine.state_dict().tensors
        if controllers.rank == 0:
            flat = {f"{part}.{name}": x.contiguous() for part, found in tensors.items() for name, x in found.items()}
            save_file(flat | {f"metrics.{name}": torch.tensor(value) for name, value in metrics.items()}, out)
