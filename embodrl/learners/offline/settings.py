"""The section ``algorithm.offline``. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from embodrl.config.schema.algorithm import AlgorithmConfig
from embodrl.config.schema.optional import section_in
from embodrl.config.schema.section import AppliesIf, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class OfflineConfig(Section):
    """IQL, TD3+BC and RECAP: amount of training on the dataset, and weights or labels of its actions."""

    updates: PositiveInt = Field(default=500, description="optimizer steps per iteration")
    expectile: Annotated[float, AppliesIf("algorithm.loss_type", ("iql",))] = Field(
        default=0.7,
        gt=0,
        lt=1,
        description="expectile of the Q values that V approximates; 0.5: the mean, towards 1: the maximum",
    )
    temperature: Annotated[NonNegativeFloat, AppliesIf("algorithm.loss_type", ("iql",))] = Field(
        default=3.0, description="beta of the weights exp(beta A) of actions; 0 is plain imitation"
    )
    max_weight: Annotated[PositiveFloat, AppliesIf("algorithm.loss_type", ("iql",))] = Field(
        default=100.0, description="maximum weight of an action"
    )
    alpha: Annotated[PositiveFloat, AppliesIf("algorithm.loss_type", ("td3_bc",))] = Field(
        default=2.5, description="TD3+BC: weight of the critic's value, relative to the distance to the data's actions"
    )
    policy_noise: Annotated[NonNegativeFloat, AppliesIf("algorithm.loss_type", ("td3_bc",))] = Field(
        default=0.2, description="TD3+BC: standard deviation of the noise on the target actor's actions, of [-1, 1]"
    )
    noise_clip: Annotated[NonNegativeFloat, AppliesIf("algorithm.loss_type", ("td3_bc",))] = Field(
        default=0.5, description="TD3+BC: bound of that noise"
    )
    tag: Annotated[str, AppliesIf("algorithm.loss_type", ("recap",))] = Field(
        default="recap", description="RECAP: tag of the labels that `embodrl label` wrote next to the data"
    )
    condition_dropout: Annotated[Fraction, AppliesIf("algorithm.loss_type", ("recap",))] = Field(
        default=0.3, description="RECAP: fraction of the frames whose instruction omits the advantage"
    )
    label_smoothing_bins: Annotated[NonNegativeFloat, AppliesIf("algorithm.loss_type", ("iql", "recap"))] = Field(
        default=0.0, description="token policies: standard deviation of the Gaussian target, in bins; 0 is one-hot"
    )


def offline_settings(algorithm: AlgorithmConfig) -> OfflineConfig:
    """Return the section, with defaults if the configuration has none."""
    return section_in(algorithm, "offline", OfflineConfig)
