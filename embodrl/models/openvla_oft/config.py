"""OpenVLA-OFT checkpoints beyond OpenVLA's files; their config.json files may be identical."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.errors import CheckpointError, StatisticsMissingError
from embodrl.fields import Fields
from embodrl.models.common.norm_stats import ActionStats, StatsSets, is_constant, read_mask, read_range
from embodrl.models.openvla_oft.components import ACTION_HEAD, NOISY_ACTIONS, PROPRIO, VISION, component_file
from embodrl.models.openvla_oft.spec import OpenVlaOftConfig

MAX_IMAGES = 4
TINY_PROPRIO_DIM = 32
ALOHA_DIM = 14


@dataclass(frozen=True)
class ProprioStats:
    """Range ``float64[S]`` of each state dimension: quantiles for LIBERO and Bridge, minimum and maximum for ALOHA.

    ``mask bool[S]`` is False where a dimension stays unchanged.
    """

    q01: NDArray[np.float64]
    q99: NDArray[np.float64]
    mask: NDArray[np.bool_]

    def normalize(self, state: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return ``2 (s - q01) / (q99 - q01 + 1e-8) - 1`` where ``mask``, else ``s``, in [-1, 1]; ``[...,S]``.

        The range of a constant dimension is 1.
        """
        values = np.asarray(state, dtype=np.float64)
        span = self.q99 - self.q01
        span = np.where(is_constant(span, self.q01, self.q99), 1.0, span + 1e-8)
        scaled = 2.0 * (values - self.q01) / span - 1.0
        return np.clip(np.where(self.mask, scaled, values), -1.0, 1.0)


def normalization_of(config: OpenVlaOftConfig) -> tuple[str, str]:
    """Return the names of the statistics that are scaled to -1 and 1, for actions and states.

    By default as in the reference: minimum and maximum for ALOHA's 14 dimensions, else quantiles.
    """
    chosen = config.normalization or ("min_max" if config.action_dim == ALOHA_DIM else "quantiles")
    return ("min", "max") if chosen == "min_max" else ("q01", "q99")


def choose_action_stats(sets: StatsSets, stats: ActionStats, ends: tuple[str, str]) -> ActionStats:
    """Return a dataset's statistics ``stats`` with other ends of the range; errors as in ``choose_stats``."""
    if ends == ("q01", "q99"):
        return stats
    low, high = read_range(sets[stats.key].fields("action"), *ends)
    if len(low) != stats.action_dim:
        raise CheckpointError(
            f"action statistics '{stats.key}': '{ends[0]}' has {len(low)} entries, not {stats.action_dim}",
            "set model.normalization=quantiles, or fix the file",
            code="statistics-size",
        )
    return ActionStats(stats.key, low, high, stats.mask)


def choose_proprio_stats(
    sets: StatsSets, key: str, source: str, ends: tuple[str, str] = ("q01", "q99")
) -> ProprioStats:
    """Return the state statistics of action statistics ``key``; raise ``CheckpointError`` if missing or invalid."""
    state = sets[key].fields("proprio", {})
    if ends[0] not in state:
        raise StatisticsMissingError(
            f"{source}: the statistics '{key}' have no '{ends[0]}' of the robot's state",
            f"set model.use_proprio=false, or add 'proprio' with {ends[0]} and {ends[1]} to dataset_statistics.json",
        )
    low, high = read_range(state, *ends)
    return ProprioStats(low, high, read_mask(state, len(low)))


def check_components(directory: Path, config: OpenVlaOftConfig) -> None:
    """Raise ``CheckpointError`` for components that the settings omit."""
    # A diffusion head is the one with a projector of noisy actions.
    head = "l1" if component_file(directory, NOISY_ACTIONS) is None else "diffusion"
    wanted = {
        NOISY_ACTIONS: (config.action_head == "diffusion", "model.action_head=diffusion"),
        ACTION_HEAD: (config.action_head == head, f"model.action_head={head}"),
        VISION: (config.use_film, "model.use_film=true"),
        PROPRIO: (config.use_proprio, "model.use_proprio=true env.include_state=true"),
    }
    for name, (is_used, setting) in wanted.items():
        path = component_file(directory, name)
        if path is not None and not is_used:
            raise CheckpointError(
                f"{path} belongs to the policy; without it actions would be wrong",
                f"set {setting}; to fine-tune without it, remove the file",
                code="oft-component-unused",
            )


def check_choices(own: Fields, config: OpenVlaOftConfig, source: str) -> None:
    """Raise ``CheckpointError`` if embodrl trained a policy with other choices than the settings.

    Public files omit them: moojink/openvla-oft and SimpleVLA-RL keep the stop token, RLinf's own loader drops it.
    """
    for name, setting in (("keep_stop_token", config.keep_stop_token), ("use_film", config.use_film)):
        trained = own.flag(name, setting)
        if trained != setting:
            text = f"model.{name}={str(trained).lower()}"
            raise CheckpointError(f"{source} was trained with {text}", f"set {text}", code="oft-settings")
    steps = own.integer("diffusion_steps", config.diffusion_steps)
    if steps != config.diffusion_steps:
        text = f"model.diffusion_steps={steps}"
        raise CheckpointError(f"{source} was trained with {text}", f"set {text}", code="oft-settings")
    trained = own.text("normalization", ends := normalization_of(config)[0])
    if trained != ends:
        text = f"model.normalization={'min_max' if trained == 'min' else 'quantiles'}"
        raise CheckpointError(f"{source} was trained with {text}", f"set {text}", code="oft-settings")
