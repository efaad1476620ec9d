"""Rewards from a model trained by `embodrl reward train`, for finished and for recorded episodes.

Shapes: n actions of an episode, t chunks of C actions, N recorded frames.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodrl.data.demos import Demos
from embodrl.envs.base import EnvSpec
from embodrl.errors import EmbodrlError
from embodrl.models.common.observation_model import ObservationModel
from embodrl.workers.episode import Episode


class LearnedReward:
    """Rewards an episode with a trained model; callable as a reward function.

    A success classifier pays 1 at the last action if it classifies the last observation as a success, else 0. A
    progress model pays the gain in value over each chunk, at the chunk's last action, so that an episode is paid
    ``V(last) - V(first)``: a potential without a discount (Ng et al. 1999, "Policy Invariance Under Reward
    Transformations").

    Raises:
        CheckpointError: the model is missing or damaged.
    """

    def __init__(self, directory: str, chunk: int) -> None:
        self.directory = directory
        self.chunk = chunk
        self.model = ObservationModel.load(Path(directory).expanduser())

    def check(self, spec: EnvSpec) -> None:
        """Reject simulators whose observations differ from the training data.

        Raises:
            EmbodrlError: they differ.
        """
        known = self.model.spec
        tasks = self.model.facts.get("tasks")
        other = [task for task in spec.tasks if isinstance(tasks, list) and task not in tasks]
        seen = (len(spec.cameras), spec.state_dim)
        if other or known.num_cameras not in (0, seen[0]) or known.state_dim not in (0, seen[1]):
            wanted = f"{known.num_cameras} camera(s), {known.state_dim} numbers of state"
            found = f"has the task '{other[0]}'" if other else f"has {seen[0]} camera(s), {seen[1]} numbers of state"
            raise EmbodrlError(
                f"the model in {self.directory} was trained on {wanted} of the tasks {tasks}, and the run {found}",
                "train one on data of this environment: embodrl reward train; or set reward.model to another one",
                code="reward-other-environment",
            )

    @property
    def threshold(self) -> float:
        """Probability from which an episode counts as solved."""
        return self.model.threshold

    @property
    def fingerprint(self) -> Tensor:
        """``int64[]``: a checksum of the weights, for checkpoints."""
        result = 0
        for _, tensor in sorted(self.model.state_dict().items()):
            result = zlib.crc32(tensor.contiguous().numpy().tobytes(), result)
        return torch.tensor(result)

    def __call__(self, episode: Episode) -> float | Tensor:
        """Return one number, or ``float32[n]``."""
        images = episode.images
        states = episode.states
        instruction = episode.instruction
        first = episode.start_images
        began = episode.start_state
        assert images is not None and states is not None and instruction is not None
        assert first is not None and began is not None, "the rollout keeps initial observations"
        if self.model.kind == "success":
            seen = self.model.inputs(images[-1:].numpy(), states[-1:].numpy(), [instruction])
            return float(self.model.judge(seen)[0] >= self.model.threshold)
        whole = torch.cat([first[None], images]).numpy()
        over = torch.cat([began[None], states]).numpy()
        values = self.model.judge(self.model.inputs(whole, over, [instruction] * len(whole)))
        rewards = torch.zeros(len(episode.rewards))
        ends = (torch.arange(1, len(images) + 1) * self.chunk).clamp(max=len(rewards)) - 1
        return rewards.index_add(0, ends, values.diff())

    def relabel(self, demos: Demos) -> Demos:
        """Return recorded episodes with the rewards that a run with this model would pay, with one action per chunk.

        Raises:
            EmbodrlError: the model was trained for another environment.
        """
        assert demos.outcomes is not None
        words = demos.said(slice(None))
        judged = self.model.judge(self.model.inputs(demos.images, demos.state, words)).numpy()
        index = np.arange(len(judged))
        if self.model.kind == "success":
            rewards = ((judged >= self.model.threshold) & (index == demos.last)).astype(np.float32)
        else:  # the observation after the last action is not recorded
            rewards = judged[np.minimum(index + 1, demos.last)] - judged
        return replace(demos, outcomes=replace(demos.outcomes, rewards=rewards.astype(np.float32)))
