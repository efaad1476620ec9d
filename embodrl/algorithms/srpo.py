"""SRPO: rewards for failures by their similarity to successes of the same task.

Self-Referential Policy Optimization (Fei et al. 2025, arXiv 2511.15605) gives a success 1 and a failure less, by the
distance of its trajectory embedding to the embeddings of successes. Differences from the public code:

- Frames belong to one episode each. There, the members of a group shared a key and pooled their frames.
- Every environment takes part. There, only as many as there are groups did.
- Successes of earlier rollouts (``memory``) stand in where a rollout has none of a task; rewards are all 0 only until a
  task's first success, which is counted. There, such a task had no gradient.
- A short episode repeats frames in order. There, it restarted.
- The distance of DBSCAN is the root mean square over standardised dimensions. There it is the Euclidean norm, which
  grows with the width of the encoder: at 1408 dimensions nothing is within 0.5 of anything.

Shapes: E episodes, D dimensions of an embedding, T frames, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from embodrl.algorithms.advantages import divisor
from embodrl.config.schema import SrpoConfig
from embodrl.errors import EmbodrlError, MissingDependencyError
from embodrl.names import import_function

Encoder = Callable[[Tensor], Tensor]
GRID = 8


def sample_frames(frames: Tensor, num_frames: int) -> Tensor:
    """Return ``num_frames`` of ``uint8[T,H,W,3]``, evenly spaced from first to last."""
    return frames[torch.linspace(0, len(frames) - 1, num_frames).round().long()]


def pixel_encoder(frames: Tensor) -> Tensor:
    """Embed episodes ``uint8[E,T,H,W,3]`` without weights to ``float32[E,384]`` in 0 to 1.

    8 x 8 thumbnails of the last and the mean frame: final object positions, and positions along the way. Suits fixed
    cameras and simple scenes.
    """
    num_episodes, num_frames = frames.shape[:2]
    pixels = frames.flatten(0, 1).permute(0, 3, 1, 2).float() / 255.0
    thumbnails = functional.adaptive_avg_pool2d(pixels, GRID).reshape(num_episodes, num_frames, -1)
    return torch.cat([thumbnails[:, -1], thumbnails.mean(1)], dim=1)


class VJepa2Encoder:
    """Mean token of V-JEPA 2 (Assran et al. 2025, arXiv 2506.09985), loaded on first use.

    ``path`` holds config.json and model.safetensors in transformers layout. Raises EmbodrlError if it does not, and
    MissingDependencyError if the installed transformers has no V-JEPA 2.
    """

    MEAN = (0.485, 0.456, 0.406)
    STD = (0.229, 0.224, 0.225)

    def __init__(self, path: str) -> None:
        try:
            from transformers import VJEPA2Model
        except ImportError as error:
            raise MissingDependencyError(
                "transformers has no V-JEPA 2", "install transformers 5.16 or later", code="srpo-encoder"
            ) from error
        if not (Path(path).expanduser() / "config.json").is_file():
            raise EmbodrlError(
                f"'{path}' holds no V-JEPA 2",
                "set algorithm.srpo.encoder_path to a directory with its config.json",
                code="srpo-encoder",
            )
        model: Any = VJEPA2Model
        self.model = model.from_pretrained(Path(path).expanduser(), local_files_only=True, use_safetensors=True).eval()

    def __call__(self, frames: Tensor) -> Tensor:
        """Embed ``uint8[E,T,H,W,3]`` to ``float32[E,D]``, one episode at a time to save memory."""
        return torch.stack([self._embed(episode) for episode in frames])

    def _embed(self, frames: Tensor) -> Tensor:
        size = int(self.model.config.crop_size)
        # The encoder takes frames in tubes of a fixed length: repeat the last frame to fill the last tube.
        odd = -len(frames) % int(self.model.config.tubelet_size)
        frames = torch.cat([frames, frames[-1:].expand(odd, -1, -1, -1)])
        pixels = frames.permute(0, 3, 1, 2).float() / 255.0
        pixels = functional.interpolate(pixels, (size, size), mode="bilinear", antialias=True, align_corners=False)
        mean, std = (torch.tensor(x).view(3, 1, 1) for x in (self.MEAN, self.STD))
        with torch.no_grad():
            output = self.model(pixel_values_videos=((pixels - mean) / std).unsqueeze(0), skip_predictor=True)
        return output.last_hidden_state[0].float().mean(0)


def make_encoder(config: SrpoConfig) -> Encoder:
    """Return the configured encoder, built on first use; EmbodrlError if it is unavailable."""
    if config.encoder == "pixels":
        return pixel_encoder
    if config.encoder != "vjepa2":
        return import_function(config.encoder)
    if config.encoder_path is None:
        raise EmbodrlError(
            "the encoder vjepa2 needs weights", "set algorithm.srpo.encoder_path=DIRECTORY", code="srpo-encoder"
        )
    path = config.encoder_path
    loaded = list[VJepa2Encoder]()

    def encode(frames: Tensor) -> Tensor:
        if not loaded:
            loaded.append(VJepa2Encoder(path))
        return loaded[0](frames)

    return encode


def dbscan(points: Tensor, eps: float, min_samples: int) -> Tensor:
    """Cluster points ``float[N,D]`` by density (Ester et al. 1996).

    The distance is the root mean square over the dimensions; core points have ``min_samples`` neighbours within
    ``eps``, including themselves. Returns ``int64[N]``: the cluster of each point, -1 for noise. A border point joins
    the first cluster that reaches it.
    """
    # float64: distances of many points come from matrix products, which lose small distances.
    near = torch.cdist(points.double(), points.double()) / max(points.shape[1], 1) ** 0.5 <= eps
    core = near.sum(1) >= min_samples
    label = torch.full((len(points),), -1, dtype=torch.int64)
    cluster = 0
    for seed in range(len(points)):
        if label[seed] >= 0 or not core[seed]:
            continue
        reached = torch.zeros(len(points), dtype=torch.bool)
        reached[seed] = True
        while True:
            # Only core points extend a cluster; border points join it.
            further = reached | near[reached & core].any(0)
            if bool((further == reached).all()):
                break
            reached = further
        label[reached & (label < 0)] = cluster
        cluster += 1
    return label


def success_centres(successes: Tensor, eps: float, min_samples: int) -> Tensor:
    """Return ``float[M,D]``: the mean of each DBSCAN cluster of ``successes float[N,D]``, or of all if they form none.

    N is at least 1; ``eps`` is a radius on standardised dimensions, ``min_samples`` the core-point threshold.
    """
    points = successes.double()
    # A dimension that varies only by rounding stays 0.
    scaled = (points - points.mean(0)) / divisor(points.std(0, correction=0), points.abs().amax(0))
    label = dbscan(scaled, eps, min_samples)
    clusters = [successes[label == cluster].mean(0) for cluster in range(int(label.max()) + 1)]
    return torch.stack(clusters or [successes.mean(0)])


def failure_rewards(failures: Tensor, centres: Tensor, scale: float, steepness: float) -> Tensor:
    """Return ``float[N]``: ``scale * sigmoid(steepness * (0.5 - d))``, d the distance to the nearest centre ``[M,D]``.

    Distances of ``failures [N,D]`` are scaled to 0 (nearest) .. 1 (farthest); where they hardly differ, d is 0.5.
    """
    # float64: distances of many points come from matrix products, which lose small distances.
    distance = torch.cdist(failures.double(), centres.double()).min(1).values
    above = distance - distance.min()
    # The rounding error is that of the embeddings, not of the distances, which may be much smaller.
    span = divisor(above.max(), failures.double().square().sum(1).sqrt().max())
    relative = above / span if span.isfinite() else torch.full_like(above, 0.5)
    return (scale * torch.sigmoid(steepness * (0.5 - relative))).to(failures.dtype)


@dataclass
class SrpoRewards:
    """Rewards of whole episodes.

    Attributes:
        config: section ``algorithm.srpo``.
        memory: embeddings ``float32[N,D]`` of the latest successes by task.
        without_reference: tasks of the last call without any success so far.
    """

    config: SrpoConfig
    memory: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    without_reference: int = 0

    def __call__(self, embeddings: Tensor, success: Tensor, task_id: Tensor) -> Tensor:
        """Return ``float32[E]``: 1 for a success, less for a failure.

        ``embeddings`` are ``float[E,D]``, ``success`` is ``bool[E]``, ``task_id`` ``int64[E]``. Raises EmbodrlError
        unless there is one finite vector per episode.
        """
        if embeddings.ndim != 2 or len(embeddings) != len(success) or not bool(embeddings.isfinite().all()):
            raise EmbodrlError(
                f"the encoder '{self.config.encoder}' returned {list(embeddings.shape)} for {len(success)} episodes,"
                " or non-finite values",
                "return one finite vector per episode, float[E, D]",
                code="srpo-embeddings",
            )
        rewards = success.float()
        self.without_reference = 0
        for task in sorted(set(map(int, task_id))):
            here = task_id == task
            solved = embeddings[here & success].float()
            reference = solved if len(solved) else self.memory.get(task, solved)
            failed = here & ~success
            if bool(failed.any()) and len(reference):
                centres = success_centres(reference, self.config.cluster_eps, self.config.cluster_min_samples)
                rewards[failed] = failure_rewards(
                    embeddings[failed].float(), centres, self.config.failure_scale, self.config.steepness
                )
            self.without_reference += not len(reference)
            if len(solved) and self.config.memory:
                known = self.memory.get(task, solved[:0])
                self.memory[task] = torch.cat([known, solved])[-self.config.memory :]
        return rewards
