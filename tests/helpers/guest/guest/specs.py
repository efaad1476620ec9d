"""What embodrl reads of the parts before it needs them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from embodrl.config.rules.base import Context
from embodrl.config.schema import EnvConfig, ModelConfig, Section, WireKeysConfig
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import (
    EngineSpec,
    FunctionSpec,
    LauncherSpec,
    ModelSpec,
    ServeProtocolSpec,
    SimulatorSpec,
    SmallActorSpec,
    VerbSpec,
)


class WorldConfig(EnvConfig):
    """The section ``env``."""

    slope: float = Field(default=1.0, gt=0, description="by which rewards are multiplied")


class PolicyConfig(ModelConfig):
    """The section ``model``."""

    width: int = Field(default=16, gt=0, description="hidden units")


class ReturnsConfig(Section):
    """The section ``algorithm.guest_returns``."""

    scale: float = Field(default=1.0, gt=0, description="of the advantages")


class LossConfig(Section):
    """The section ``algorithm.guest_loss``."""

    tilt: float = Field(default=1.0, description="of the loss")


class EngineConfig(Section):
    """The section ``actor.guest_engine``."""

    shrink: float = Field(default=1.0, gt=0, le=1, description="factor of the gradients")


class LauncherConfig(Section):
    """The section ``cluster.guest_launcher``."""

    note: str = Field(default="", description="written into a file for each worker")


class ActorConfig(Section):
    """The section ``model.guest_actor``."""

    limit: float = Field(default=1.0, gt=0, description="largest number of a frozen action")


class ProtocolConfig(WireKeysConfig):
    """The section ``serve.guest_protocol``."""

    greeting: str = Field(default="hello", description="first message")


class GreetConfig(Section):
    """The section ``greet``."""

    name: str = Field(default="world", description="who is greeted")


RULES = RuleSet()


@RULES.rule("actor.guest_engine", "algorithm.guest_loss")
def guest_numbers_differ(context: Context) -> Iterator[Finding]:
    """A rule over two sections of the package."""
    engine = getattr(context.config.actor, "guest_engine", EngineConfig())
    loss = getattr(context.config.algorithm, "guest_loss", LossConfig())
    if engine.shrink == 0.25 and loss.tilt == 0.25:
        yield Finding("actor.guest_engine.shrink", "is as algorithm.guest_loss.tilt", "change one of them")


WORLD = SimulatorSpec(
    name="guest_world",
    target="guest.parts:World",
    settings=WorldConfig,
    reads=("image_size", "state"),
    tasks=("reach-red", "reach-green"),
    action_dim=7,
)
POLICY = ModelSpec(
    name="guest_policy", target="guest.parts:build_policy", settings=PolicyConfig, uses_state=True, uses_images=False
)
RETURNS = FunctionSpec(
    name="guest_returns",
    target="guest.parts:returns",
    settings=ReturnsConfig,
    parameters=("rewards", "valid", "terminated", "truncated", "gamma", "scale"),
)
LOSS = FunctionSpec(
    name="guest_loss",
    target="guest.parts:loss",
    settings=LossConfig,
    parameters=("logprobs", "old_logprobs", "advantages", "valid", "counts", "tilt"),
)
ENGINE = EngineSpec(
    name="guest_engine",
    training="guest.parts:make_engine",
    training_settings=EngineConfig,
    shards=True,
    rules=(RULES,),
)
LAUNCHER = LauncherSpec(name="guest_launcher", target="guest.parts:Launcher", settings=LauncherConfig)
ACTOR = SmallActorSpec(name="guest_actor", target="guest.parts:Actor", settings=ActorConfig)
PROTOCOL = ServeProtocolSpec(name="guest_protocol", target="guest.listener:Listener", settings=ProtocolConfig)
VERB = VerbSpec(name="greet", target="guest.verb:greet", description="Greet.", sections={"greet": GreetConfig})
