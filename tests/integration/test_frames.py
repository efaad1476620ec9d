"""How far `embodrl train` is from the gradient: what a reader has to walk through."""

from pathlib import Path

import pytest
from runs import embodrl

pytestmark = pytest.mark.slow

MAX_FRAMES = 12
COUNT = """
import os, traceback
import torch

def grad(*args, **kwargs):
    frames = [f for f in traceback.extract_stack() if f"{os.sep}embodrl{os.sep}" in f.filename]
    print("\\n".join(f"{f.filename}:{f.lineno} {f.name}" for f in frames), flush=True)
    os._exit(0)

torch.autograd.grad = grad
"""
SETTINGS = (
    "env=toy",
    "model.warm_start=null",
    "cluster.num_threads=1",
    "env.num_processes=1",
    "env.train.total_num_envs=4",
    "env.train.max_steps_per_rollout_epoch=10",
    "env.eval.total_num_envs=4",
    "env.eval.num_episodes=4",
    "actor.global_batch_size=4",
    "actor.micro_batch_size=4",
    "runner.eval_at_start=false",
    "runner.logger.console=off",
    "extensions=[count_frames]",
)


def test_few_frames_lie_between_the_command_and_the_gradient(tmp_path: Path) -> None:
    (tmp_path / "count_frames.py").write_text(COUNT)
    outcome = embodrl("train", *SETTINGS, f"runner.output_dir={tmp_path / 'run'}", search_path=tmp_path)
    frames = outcome.stdout.splitlines()
    assert "main" in frames[0] and "differentiate" in frames[-1]
    assert len(frames) <= MAX_FRAMES, "\n".join(frames)
