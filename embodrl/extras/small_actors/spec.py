"""Small actors on frozen policies, and the verb `embodrl model token`."""

from __future__ import annotations

from embodrl.specs import SmallActorSpec, VerbSpec

RESIDUAL = SmallActorSpec(
    name="residual",
    target="embodrl.extras.small_actors.on_frozen:ResidualPolicy",
    description="adds to the frozen policy's action",
)
DSRL = SmallActorSpec(
    name="dsrl",
    target="embodrl.extras.small_actors.on_frozen:NoisePolicy",
    description="chooses the noise that a flow policy denoises",
)
RLT = SmallActorSpec(
    name="rlt",
    target="embodrl.extras.small_actors.on_frozen:ReferencePolicy",
    description="chooses the action near the frozen policy's, from an RL token",
    engine="embodrl.extras.small_actors.rlt_engine:RltEngine",
)
VERB = VerbSpec(name="model.token", target="embodrl.extras.small_actors.cli:token")
