"""The section ``algorithm.rlt``. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from embodrl.config.schema.section import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class RltConfig(Section):
    """RLT: how far the actor may move from the frozen policy's actions; weights change over ramp_updates."""

    reference_dropout: Fraction = Field(
        default=0.5, description="fraction of rows per update whose actor does not see the reference action"
    )
    q_weight: NonNegativeFloat = Field(default=1.0, description="weight of the critics in the actor's first update")
    q_weight_end: PositiveFloat = Field(default=1.0, description="weight of the critics from ramp_updates on")
    bc_weight: NonNegativeFloat = Field(
        default=1.0, description="weight of the squared distance to the reference in the actor's first update"
    )
    bc_weight_end: NonNegativeFloat = Field(default=0.1, description="weight of that distance from ramp_updates on")
    ramp_updates: PositiveInt = Field(
        default=2000, description="critic updates after critic_warm_up over which both weights change"
    )
