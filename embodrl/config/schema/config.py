"""The whole configuration. Unknown keys are errors; cross-field rules are in ``config/rules``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Self, cast

from pydantic import Field, SerializeAsAny, ValidationInfo, create_model, field_validator

from embodrl.config.schema.algorithm import AlgorithmConfig
from embodrl.config.schema.cluster import ClusterConfig
from embodrl.config.schema.engines import ActorConfig, RolloutConfig
from embodrl.config.schema.env import EnvConfig
from embodrl.config.schema.model import ModelConfig
from embodrl.config.schema.optional import present_in, with_sections
from embodrl.config.schema.run import (
    CollectConfig,
    PipelineConfig,
    RecipeConfig,
    RewardConfig,
    RunnerConfig,
    SftConfig,
)
from embodrl.config.schema.section import DEMONSTRATIONS, EPISODES, POLICY, RL, TRAINING, AppliesIf, ReadBy, Section
from embodrl.config.schema.serve import ServeConfig
from embodrl.config.schema.tagged import env_settings, model_settings
from embodrl.specs import DEFAULT_ENV, DEFAULT_MODEL, ENVS

WIDENED: Mapping[str, type[Section]] = {
    "algorithm": AlgorithmConfig,
    "actor": ActorConfig,
    "rollout": RolloutConfig,
    "serve": ServeConfig,
    "cluster": ClusterConfig,
}
"""Sections that have further ones, of estimators and losses, engines, protocols and launchers."""


class Config(Section):
    """A whole run."""

    env: SerializeAsAny[EnvConfig] = Field(
        default_factory=lambda: env_settings(DEFAULT_ENV)(), description="simulator and tasks"
    )
    model: Annotated[SerializeAsAny[ModelConfig], POLICY] = Field(
        default_factory=lambda: model_settings(DEFAULT_MODEL)(), description="the policy"
    )
    algorithm: Annotated[SerializeAsAny[AlgorithmConfig], RL] = Field(
        default=AlgorithmConfig(), description="advantages, losses, sampling"
    )
    reward: Annotated[RewardConfig, AppliesIf("reward.judged", reason="reward.fn and reward.model are null"), RL] = (
        Field(default=RewardConfig(), description="a custom reward function")
    )
    pipeline: Annotated[PipelineConfig, RL] = Field(
        default=PipelineConfig(), description="the graph that an iteration walks"
    )
    actor: Annotated[SerializeAsAny[ActorConfig], TRAINING] = Field(
        default=ActorConfig(), description="training backend and optimizer"
    )
    rollout: Annotated[SerializeAsAny[RolloutConfig], POLICY] = Field(
        default=RolloutConfig(), description="inference backend"
    )
    cluster: SerializeAsAny[ClusterConfig] = Field(default=ClusterConfig(), description="devices and placement")
    runner: Annotated[RunnerConfig, TRAINING] = Field(
        default=RunnerConfig(), description="loop, evaluation, checkpoints, logs"
    )
    collect: Annotated[CollectConfig, DEMONSTRATIONS] = Field(
        default=CollectConfig(), description="demonstrations by scripted experts"
    )
    sft: Annotated[SftConfig, ReadBy("sft", "store")] = Field(default=SftConfig(), description="supervised fine-tuning")
    recipe: Annotated[RecipeConfig, ReadBy("run")] = Field(
        default=RecipeConfig(), description="stages of `embodrl run`"
    )
    serve: Annotated[SerializeAsAny[ServeConfig], ReadBy("serve")] = Field(
        default=ServeConfig(), description="the policy server"
    )
    protocol: Annotated[str | None, EPISODES] = Field(
        default=None,
        description="a name of `embodrl list protocols`: settings of a published evaluation, which win over presets and"
        " defaults and give way to yours; null for none",
    )
    axes: Annotated[str | None, ReadBy("eval")] = Field(
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

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """As pydantic's; the configuration has the further sections of verbs that the text has."""
        found = json.loads(json_data)
        further = present_in("", cast(dict[str, object], found), cls) if isinstance(found, dict) else {}
        made = with_sections(cls, further)
        return super(Config, made).model_validate_json(json_data, **options)

    @field_validator("env", "model", *WIDENED, mode="before")
    @classmethod
    def _of_its_type(cls, value: object, info: ValidationInfo) -> object:
        """Validate a section that depends on its type, or on what is chosen, with the settings of that."""
        if not isinstance(value, dict):
            return value
        section = cast(dict[str, object], value)
        settings = section_class(info.field_name or "", section)
        # in JSON mode lists become tuples, although types are strict
        return (
            settings.model_validate_json(json.dumps(section))
            if info.mode == "json"
            else settings.model_validate(section)
        )


def section_class(name: str, section: Mapping[str, object]) -> type[Section]:
    """Return the class of a section that depends on its type, or on the engines or protocols that it names."""
    if name == "env":
        return env_settings(section.get("env_type", DEFAULT_ENV))
    if name == "model":
        settings = model_settings(section.get("model_type", DEFAULT_MODEL))
        return with_sections(settings, present_in(name, section, settings))
    return with_sections(WIDENED[name], present_in(name, section, WIDENED[name]))


def algorithm_of(text: str) -> AlgorithmConfig:
    """Return the section ``algorithm`` that ``model_dump_json`` wrote, with that of its estimator and loss."""
    return cast(AlgorithmConfig, section_class("algorithm", json.loads(text)).model_validate_json(text))


@lru_cache(maxsize=64)
def config_class(**sections: type[Section]) -> type[Config]:
    """Return the class of a configuration whose sections of these names are of these classes."""
    fields: dict[str, Any] = {}
    for name, cls in sections.items():
        info = Config.model_fields[name]
        read_by = tuple(each for each in info.metadata if isinstance(each, ReadBy))
        kind = Annotated[(cls, *read_by)] if read_by else cls
        fields[name] = (kind, Field(default=cls(), description=info.description))
    return create_model("Config", __base__=Config, **fields)


def schema_for(values: Mapping[str, object]) -> type[Config]:
    """Return the schema of a configuration with these values; the common settings of a simulator or model unknown.

    Args:
        values: of the sections, as from YAML; what is wrong with them is not looked at.
    """
    sections = {name: values.get(name) for name in ("env", "model", *WIDENED)}
    mappings = {
        name: cast(dict[str, object], section) if isinstance(section, dict) else {}
        for name, section in sections.items()
    }
    schema = config_class(**{name: section_class(name, section) for name, section in mappings.items()})
    return with_sections(schema, present_in("", values, schema))


def defaults_of(config: Config) -> Config:
    """Return the defaults of a configuration with this simulator and model, and with the same further sections."""
    return type(config)(**{name: type(getattr(config, name))() for name in ("env", "model", *WIDENED)})
