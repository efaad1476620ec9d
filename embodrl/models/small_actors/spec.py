"""Small actors on frozen policies, and the verb `embodrl model token`."""

from __future__ import annotations

from embodrl.models.small_actors.rules import RLT_RULES, RULES
from embodrl.models.small_actors.settings import RltConfig
from embodrl.specs import FunctionSpec, SmallActorSpec, VerbSpec

RESIDUAL = SmallActorSpec(
    name="residual",
    target="embodrl.models.small_actors.on_frozen:ResidualPolicy",
    description="adds to the frozen policy's action",
    rules=(RULES,),
)
DSRL = SmallActorSpec(
    name="dsrl",
    target="embodrl.models.small_actors.on_frozen:NoisePolicy",
    description="chooses the noise that a flow policy denoises",
    rules=(RULES,),
)
RLT = SmallActorSpec(
    name="rlt",
    target="embodrl.models.small_actors.on_frozen:ReferencePolicy",
    description="chooses the action near the frozen policy's, from an RL token",
    rules=(RULES,),
    update="embodrl.learners.rlt:RltUpdate",
)
VERB = VerbSpec(
    name="model.token",
    target="embodrl.cli.model_token:token",
    description="Train an RL token of a frozen VLA: one small vector that summarises images and prompt"
    " (algorithm=rlt).",
)
RLT_LOSS = FunctionSpec(
    name="rlt",
    target="embodrl.algorithms.rlt:rlt",
    description="a small actor on an RL token of a frozen policy, kept near the policy's actions",
    off_policy=True,
    settings=RltConfig,
    rules=(RLT_RULES,),
)
