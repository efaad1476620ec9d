"""Training of small networks on the frames of a dataset: value functions, success classifiers, progress models.

Shapes: N frames, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.data.demos import Demos
from embodrl.errors import EmbodrlError, NonFiniteError
from embodrl.models.common.init import init_linears, new_generator
from embodrl.models.common.observation_model import ObservationModel
from embodrl.models.common.observation_net import LARGEST_IMAGE, ObservationSpec
from embodrl.reporting.progress import Progress

Inputs = Literal["auto", "images", "state", "both"]


@dataclass(frozen=True)
class Fitting:
    """Training settings of a network.

    Attributes:
        inputs: observations it uses; auto: images unless they are all identical, and the state if there is one.
        steps: optimizer steps.
        batch_size: frames per batch.
        lr: peak learning rate, with a cosine decay to 0.
        held_out: fraction of the episodes that are held out for evaluation.
        seed: seed of weights, batches, and the held-out split.
    """

    inputs: Inputs = "auto"
    steps: int = 1000
    batch_size: int = 256
    lr: float = 1e-3
    held_out: float = 0.1
    seed: int = 0


def successes(demos: Demos, source: object) -> NDArray[np.bool_]:
    """Return whether each episode succeeded, ``bool[E]``.

    Raises:
        EmbodrlError: the outcome of some episode is unknown.
    """
    known = [success for success in demos.success if success is not None]
    if len(known) != demos.num_episodes:
        raise EmbodrlError(
            f"{source} does not record which episodes succeeded",
            "use a dataset of `embodrl collect`",
            code="label-no-success",
        )
    return np.array(known, np.bool_)


def make_model(kind: str, demos: Demos, fitting: Fitting) -> ObservationModel:
    """Return a randomly initialised model for a dataset's observations.

    Raises:
        EmbodrlError: there are no observations.
    """
    wanted = fitting.inputs
    drawn = bool(demos.images.size) and bool((demos.images[::7] != demos.images[:1]).any())
    cameras = demos.images.shape[1] if wanted in ("images", "both") or (wanted == "auto" and drawn) else 0
    state = demos.state.shape[1] if wanted in ("auto", "state", "both") else 0
    if not cameras and not state:
        raise EmbodrlError(
            f"with inputs={wanted} the dataset has no usable observations",
            "collect with images or env.include_state=true",
            code="label-no-inputs",
        )
    instructions = sorted(demos.instruction_table)
    side = min(LARGEST_IMAGE, demos.images.shape[2]) if cameras else LARGEST_IMAGE
    model = ObservationModel(kind, ObservationSpec(cameras, state, len(instructions), side), instructions)
    generator = new_generator("cpu", fitting.seed)
    model.net.init_weights(generator)
    init_linears(model.hidden, generator)
    init_linears(model.out, generator)
    return model


def frame_inputs(model: ObservationModel, demos: Demos) -> dict[str, Tensor]:
    """Return the model inputs of all frames.

    Raises:
        EmbodrlError: the model was trained for another environment.
    """
    return model.inputs(demos.images, demos.state, demos.said(slice(None)))


def held_out_episodes(labels: Sequence[bool], fitting: Fitting) -> NDArray[np.bool_]:
    """Return the held-out episodes ``bool[E]``: a fraction of each label, at least one of labels with several."""
    rng = np.random.default_rng(fitting.seed)
    chosen = np.zeros(len(labels), np.bool_)
    if fitting.held_out:
        for label in (False, True):
            labelled = rng.permutation(np.flatnonzero(np.asarray(labels) == label))
            count = max(1, round(fitting.held_out * len(labelled))) if len(labelled) > 1 else 0
            chosen[labelled[:count]] = True
    return chosen


def fit(
    model: ObservationModel,
    inputs: dict[str, Tensor],
    frames: Tensor,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    fitting: Fitting,
    progress: Progress,
) -> None:
    """Train a model in place by AdamW.

    Args:
        model: the network.
        inputs: inputs of all frames, ``[N,...]`` by name.
        frames: training frames, ``int64[n]``.
        loss_of: maps logits ``float32[B,K]`` and frames ``int64[B]`` to their mean loss.
        fitting: training settings.
        progress: progress display.

    Raises:
        NonFiniteError: the loss is not finite.
    """
    generator = torch.Generator().manual_seed(fitting.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=fitting.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, fitting.steps)
    model.train()
    for step in range(1, fitting.steps + 1):
        rows = frames[torch.randint(len(frames), (fitting.batch_size,), generator=generator)]
        loss = loss_of(model({name: column[rows] for name, column in inputs.items()}), rows)
        if not bool(torch.isfinite(loss)):
            raise NonFiniteError(
                f"the loss of step {step} is {loss.item()}", "lower --lr, and check the states for NaN"
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        progress.update(step, f"loss {loss.item():.3f}")
    model.eval()


def spearman(left: NDArray[np.floating], right: NDArray[np.floating]) -> float | None:
    """Return the rank correlation, with mean ranks for ties; None if one side is constant."""
    first = _ranks(left)
    second = _ranks(right)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: NDArray[np.floating]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]
