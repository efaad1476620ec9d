"""What an OpenVLA-OFT checkpoint has in addition to OpenVLA's files; their config.json files may be the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import CheckpointError
from embodrl.fields import Fields
from embodrl.models.common.norm_stats import StatsSets, read_mask, read_range

MAX_IMAGES = 4
TINY_PROPRIO_DIM = 32
PROPRIO_FILE = "proprio_projector.safetensors"
PUBLIC_PROPRIO_FILES = "proprio_projector--*_checkpoint.pt"
_OTHER_KINDS = {
    "action_head--*": "a continuous action head (L1 regression or diffusion)",
    "noisy_action_projector--*": "a diffusion action head",
    "vision_backbone--*": "a vision backbone with FiLM",
}


@dataclass(frozen=True)
class ProprioStats:
    """Quantiles of each dimension of the robot's state, as the LIBERO and Bridge checkpoints normalise it.

    ALOHA checkpoints normalise by minimum and maximum instead, and have a continuous action head.

    Attributes:
        q01, q99: ``float64[S]``, in environment units.
        mask: ``bool[S]``; False passes a dimension through.
    """

    q01: NDArray[np.float64]
    q99: NDArray[np.float64]
    mask: NDArray[np.bool_]

    def normalize(self, state: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return ``2 (s - q01) / (q99 - q01 + 1e-8) - 1`` where ``mask``, else ``s``, in [-1, 1]; ``[...,S]``."""
        values = np.asarray(state, dtype=np.float64)
        scaled = 2.0 * (values - self.q01) / (self.q99 - self.q01 + 1e-8) - 1.0
        return np.clip(np.where(self.mask, scaled, values), -1.0, 1.0)


def choose_proprio_stats(sets: StatsSets, key: str, source: str) -> ProprioStats:
    """Return the statistics of the robot's state that belong to the action statistics ``key``.

    Raises:
        CheckpointError: there are none, or a value is invalid.
    """
    state = sets[key].fields("proprio", {})
    if "q01" not in state:
        raise CheckpointError(
            f"{source}: the statistics '{key}' have no quantiles of the robot's state",
            "set model.use_proprio=false, or add 'proprio' with q01 and q99 to dataset_statistics.json",
        )
    q01, q99 = read_range(state, "q01", "q99")
    return ProprioStats(q01, q99, read_mask(state, len(q01)))


def reject_other_kinds(directory: Path) -> None:
    """Refuse checkpoints whose actions are not tokens, or whose network is another one.

    Raises:
        CheckpointError: the directory has files of such a checkpoint.
    """
    for pattern, kind in _OTHER_KINDS.items():
        if any(directory.glob(pattern)):
            raise CheckpointError(
                f"{directory} has {kind}, which is not supported", "use a checkpoint with discrete action tokens"
            )


def check_stop_token(own: Fields, keep_stop_token: bool, source: str) -> None:
    """Refuse a checkpoint that embodrl trained with another choice of ``model.keep_stop_token``.

    Public files leave it open: moojink/openvla-oft and SimpleVLA-RL keep the token, RLinf's own loader drops it.

    Args:
        own: what embodrl added to config.json.
        keep_stop_token: the setting.
        source: named in errors.

    Raises:
        CheckpointError: another choice.
    """
    trained = own.flag("keep_stop_token", keep_stop_token)
    if trained != keep_stop_token:
        setting = str(trained).lower()
        raise CheckpointError(
            f"{source} was trained with model.keep_stop_token={setting}", f"set model.keep_stop_token={setting}"
        )
