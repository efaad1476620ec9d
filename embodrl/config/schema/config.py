"""The whole configuration. Unknown keys are errors; cross-field rules are in ``config/rules``."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, cast

from pydantic import Field, SerializeAsAny, ValidationInfo, create_model, field_validator

from embodrl.config.schema.algorithm import AlgorithmConfig
from embodrl.config.schema.cluster import ClusterConfig
from embodrl.config.schema.engines import ActorConfig, RolloutConfig
from embodrl.config.schema.env import EnvConfig
from embodrl.config.schema.model import ModelConfig
from embodrl.config.schema.run import (
    CollectConfig,
    PipelineConfig,
    RecipeConfig,
    RewardConfig,
    RunnerConfig,
    SftConfig,
)
from embodrl.config.schema.section import Section
from embodrl.config.schema.serve import ServeConfig
from embodrl.config.schema.store import StoreConfig
from embodrl.config.schema.tagged import env_settings, model_settings
from embodrl.specs import DEFAULT_ENV, DEFAULT_MODEL, ENVS


class Config(Section):
    """A whole run."""

    env: SerializeAsAny[EnvConfig] = Field(
        default_factory=lambda: env_settings(DEFAULT_ENV)(), description="simulator and tasks"
    )
    model: SerializeAsAny[ModelConfig] = Field(
        default_factory=lambda: model_settings(DEFAULT_MODEL)(), description="the policy"
    )
    algorithm: AlgorithmConfig = Field(default=AlgorithmConfig(), description="advantages, losses, sampling")
    reward: RewardConfig = Field(default=RewardConfig(), description="a custom reward function")
    pipeline: PipelineConfig = Field(default=PipelineConfig(), description="the graph that an iteration walks")
    actor: ActorConfig = Field(default=ActorConfig(), description="training backend and optimizer")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="inference backend")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="devices and placement")
    runner: RunnerConfig = Field(default=RunnerConfig(), description="loop, evaluation, checkpoints, logs")
    collect: CollectConfig = Field(default=CollectConfig(), description="demonstrations by scripted experts")
    sft: SftConfig = Field(default=SftConfig(), description="supervised fine-tuning")
    recipe: RecipeConfig = Field(default=RecipeConfig(), description="stages of `embodrl run`")
    serve: ServeConfig = Field(default=ServeConfig(), description="the policy server")
    store: StoreConfig = Field(default=StoreConfig(), description="what collectors, trainer and evaluators share")
    protocol: str | None = Field(
        default=None,
        description="a name of `embodrl list protocols`: settings of a published evaluation, which win over presets and"
        " defaults and give way to yours; null for none",
    )
    axes: str | None = Field(
        default=None,
        description="evaluate on perturbed episodes, too: all, or names of `embodrl list axes` separated by commas",
    )
    extensions: tuple[str, ...] = Field(
        default=(), description="modules imported first, which may register models and environments"
    )

    @property
    def chosen_axes(self) -> tuple[str, ...]:
        """The names in ``axes``; those that the tasks have for ``all``."""
        if self.axes == "all":
            return tuple(ENVS.entry(self.env.env_type).axes_of(self.env.tasks))
        return tuple(dict.fromkeys(name.strip() for name in self.axes.split(","))) if self.axes is not None else ()

    @property
    def recomputes_logprobs(self) -> bool:
        """The log-probs of all chunks come from the engine that trains."""
        wanted = self.algorithm.recompute_logprobs
        return self.rollout.backend != "native" if wanted == "auto" else wanted

    @property
    def needs_proximal(self) -> bool:
        """A rollout needs log-probs by the engine that trains, under the weights that its update begins with."""
        return self.algorithm.decoupled.needs_proximal or self.recomputes_logprobs

    @property
    def evaluated(self) -> Config:
        """The configuration that evaluations play, with what ``env.eval`` says otherwise; itself if nothing differs."""
        env = self.env.evaluated()
        return self if env is self.env else self.model_copy(update={"env": env})

    @property
    def rollout_chunks(self) -> int:
        """Chunks of an environment in a rollout, its steps rounded up to whole chunks."""
        return -(-self.env.train.max_steps_per_rollout_epoch // self.model.num_action_chunks)

    @property
    def branch_chunks(self) -> int:
        """The most chunks that the first environment of a group plays before all begin there."""
        limit = self.algorithm.branch.max_chunks
        return -(-self.env.max_episode_steps // self.model.num_action_chunks) - 1 if limit is None else limit

    @field_validator("env", "model", mode="before")
    @classmethod
    def _of_its_type(cls, value: object, info: ValidationInfo) -> object:
        """Validate a section that depends on its type with the settings of that type."""
        if not isinstance(value, dict):
            return value
        section = cast(dict[str, object], value)
        if info.field_name == "env":
            settings: type[Section] = env_settings(section.get("env_type", DEFAULT_ENV))
        else:
            settings = model_settings(section.get("model_type", DEFAULT_MODEL))
        # in JSON mode lists become tuples, although types are strict
        return (
            settings.model_validate_json(json.dumps(section))
            if info.mode == "json"
            else settings.model_validate(section)
        )


@lru_cache(maxsize=64)
def config_class(env: type[EnvConfig], model: type[ModelConfig]) -> type[Config]:
    """Return the class of a configuration whose sections ``env`` and ``model`` are of these classes."""
    sections: dict[str, Any] = {
        name: (cls, Field(default=cls(), description=Config.model_fields[name].description))
        for name, cls in (("env", env), ("model", model))
    }
    return create_model("Config", __base__=Config, **sections)


def schema_for(env_type: object, model_type: object) -> type[Config]:
    """Return the schema of a configuration with this simulator and model; the common settings for unknown ones."""
    return config_class(env_settings(env_type), model_settings(model_type))


def defaults_of(config: Config) -> Config:
    """Return the defaults of a configuration with this simulator and model."""
    return Config(env=type(config.env)(), model=type(config.model)())
