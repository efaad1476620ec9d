"""How far it is from the verb to the loss: what a reader follows to find where something is computed."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from embodrl.algorithms import losses
from embodrl.algorithms.losses import LossOutput
from embodrl.pipelines.load import load_config
from embodrl.runs.train import train

MOST_FRAMES = 12
MOST_FILES = 9
SETTINGS = (
    *("env=toy", "model.warm_start=null", "model.num_action_chunks=1", "env.pin_cpus=false", "env.video.enabled=false"),
    *("env.cameras=[{height: 16, width: 16}]", "env.max_episode_steps=4", "env.train.total_num_envs=2"),
    *("env.train.max_steps_per_rollout_epoch=4", "runner.eval_interval=0", "runner.max_iterations=1"),
    *("model.architecture={image_size: 16, patch_size: 8, hidden_size: 16, intermediate_size: 32}",),
    *("model.architecture.num_hidden_layers=1", "model.architecture.num_attention_heads=2"),
    *("model.architecture.dino={width: 8, depth: 2, num_heads: 1, mlp_dim: 16}", "cluster.num_threads=1"),
    *("model.architecture.siglip={width: 8, depth: 2, num_heads: 1, mlp_dim: 16}", "env.num_processes=1"),
    *("actor.optim.critic_warmup_iterations=0", "actor.global_batch_size=8", "actor.micro_batch_size=8"),
    *("runner.logger.console=off", "runner.logger.tensorboard=false", "cluster.device=cpu"),
)


class Reached(Exception):
    """The loss was called."""


def test_the_loss_is_near_the_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[str] = []

    def loss(**arguments: object) -> LossOutput:
        frames.extend(f"{frame.filename}:{frame.name}" for frame in traceback.extract_stack())
        raise Reached

    monkeypatch.setattr(losses, "actor_critic_loss", loss)
    with pytest.raises(Exception, match="Reached"):
        train(load_config([*SETTINGS, f"runner.output_dir={tmp_path / 'run'}"], verb="train"))
    start = next(place for place, frame in enumerate(frames) if frame.endswith("runs/train.py:train"))
    walk = [frame.rpartition("embodrl/")[2] for frame in frames[start:]]
    assert len(walk) <= MOST_FRAMES, walk
    assert len({frame.partition(":")[0] for frame in walk[:-1]}) <= MOST_FILES, walk
