"""A training process that dies is reported with its rank, before and within calls, and no process is left."""

from __future__ import annotations

import os
import select
import signal

import torch
from expect import raises_code
from tiny_training import deployment_of, tiny_rollout, training_config
from updates import update

from embodrl.algorithms.advantages import compute_advantages
from embodrl.errors import WorkerDied
from embodrl.workers.actor import make_train_engine
from embodrl.workers.policy import build_policy, configure_torch

SOON_S = 120.0


def test_a_dead_training_process_ends_all_and_is_reported() -> None:
    config = training_config(actor={"training_backend": "fsdp"})
    configure_torch(config)
    policy = build_policy(config)
    engine = make_train_engine(config, deployment_of(config, 2), policy)
    try:
        pids = engine.group.process_id().result(SOON_S)
        descriptors = [os.pidfd_open(pid) for pid in pids]
        os.kill(pids[1], signal.SIGKILL)
        batch = tiny_rollout("openvla", policy, config, 0)
        advantages = compute_advantages(batch, config.algorithm)
        # Rank 0 would wait for rank 1 forever.
        with raises_code("worker-died", WorkerDied, "actor[1]", "SIGKILL") as caught:
            update(engine, batch, advantages, config.algorithm, torch.Generator().manual_seed(0))
        assert caught.value.rank == 1
        for descriptor in descriptors:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            assert poller.poll(SOON_S * 1000)
        with raises_code("worker-died", WorkerDied, "actor[1]"):
            engine.check()
        with raises_code("worker-died", WorkerDied, "actor[1]"):
            engine.state_dict()
    finally:
        engine.close()
