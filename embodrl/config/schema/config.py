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
"""Sections that estimators, losses, engines, protocols and launchers add their own sections to."""


class Config(Section):
    """Configuration of a run."""

    env: SerializeAsAny[EnvConfig] = Field(
        default_factory=lambda: env_settings(DEFAULT_ENV)(), description="simulator and tasks"
    )
    model: Annotated[SerializeAsAny[ModelConfig], POLICY] = Field(
        default_factory=lambda: model_settings(DEFAULT_MODEL)(), description="the policy"
    )
    algorithm: Annotated[SerializeAsAny[AlgorithmConfig], RL] = Field(
        default=AlgorithmConfig(), description="advantages, losses, sampling"
    )
    reward: Annotated[RewardConfig, AppliesIf("reward.judged", reason="nothing judges episodes"), RL] = Field(
        default=RewardConfig(), description="a custom reward function"
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
        description="a name from `embodrl list protocols`: settings of a published evaluation, which override presets"
        " and defaults, but not your own settings; null for none",
    )
    axes: Annotated[str | None, ReadBy("eval")] = Field(
        default=None,
        description="also evaluate on perturbed episodes: all, or names from `embodrl list axes`, separated by commas",
    )
    extensions: tuple[str, ...] = Field(
        default=(), description="modules imported first, which may register models and environments"
    )

    @property
    def chosen_axes(self) -> tuple[str, ...]:
        """Names in ``axes``; all axes of the tasks for ``all``."""
        if self.axes == "all":
            return tuple(ENVS.entry(self.env.env_type).axes_of(self.env.tasks))
        return tuple(dict.fromkeys(name.strip() for name in self.axes.split(","))) if self.axes is not None else ()

    @property
    def recomputes_logprobs(self) -> bool:
        """Whether the training engine recomputes the log-probs of all chunks."""
        wanted = self.algorithm.recompute_logprobs
        return self.rollout.backend != "native" if wanted == "auto" else wanted

    @property
    def needs_proximal(self) -> bool:
        """Whether a rollout needs log-probs by the training engine, under the weights at the start of its update."""
        return self.algorithm.decoupled.needs_proximal or self.recomputes_logprobs

    @property
    def divides_devices(self) -> bool:
        """Whether ``cluster.placement`` gives training and rollouts devices of their own, where there are enough."""
        placement = self.cluster.placement
        return placement == "disaggregated" or (placement == "auto" and self.runner.max_staleness > 0)

    @property
    def store_url(self) -> str | None:
        """Where collectors put the episodes of this run (section ``store``); None: it gathers its own."""
        return getattr(getattr(self, "store", None), "url", None)

    @property
    def trains_beside_a_robot(self) -> bool:
        """Whether collectors of a store drive real robots for this run, which therefore evaluates nothing itself."""
        return self.store_url is not None and self.env.env_type == "robot"

    @property
    def moves_devices(self) -> bool:
        """Whether devices that ``cluster.placement`` divides may move between training and concurrent rollouts."""
        return self.divides_devices and self.runner.max_staleness > 0

    @property
    def evaluated(self) -> Config:
        """Configuration of evaluations, with the overrides in ``env.eval``; itself if there are none."""
        env = self.env.evaluated()
        return self if env is self.env else self.model_copy(update={"env": env})

    @property
    def rollout_chunks(self) -> int:
        """Chunks per environment and rollout; steps are rounded up to whole chunks."""
        return -(-self.env.train.max_steps_per_rollout_epoch // self.model.num_action_chunks)

    @property
    def branch_chunks(self) -> int:
        """Maximum chunks that a group's first environment plays before the group branches."""
        limit = self.algorithm.branch.max_chunks
        return -(-self.env.max_episode_steps // self.model.num_action_chunks) - 1 if limit is None else limit

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Validate JSON like pydantic, including the optional sections of verbs that it contains."""
        found = json.loads(json_data)
        further = present_in("", cast(dict[str, object], found), cls) if isinstance(found, dict) else {}
        made = with_sections(cls, further)
        return super(Config, made).model_validate_json(json_data, **options)

    @field_validator("env", "model", *WIDENED, mode="before")
    @classmethod
    def _of_its_type(cls, value: object, info: ValidationInfo) -> object:
        """Validate a section whose class depends on its type or on other choices."""
        if not isinstance(value, dict):
            return value
        section = cast(dict[str, object], value)
        settings = section_class(info.field_name or "", section)
        # JSON mode converts lists to tuples even with strict types
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
    """Return section ``algorithm`` from ``model_dump_json``, with the sections of its estimator and loss."""
    return cast(AlgorithmConfig, section_class("algorithm", json.loads(text)).model_validate_json(text))


@lru_cache(maxsize=64)
def config_class(**sections: type[Section]) -> type[Config]:
    """Return a configuration class whose named sections have the given classes."""
    fields: dict[str, Any] = {}
    for name, cls in sections.items():
        info = Config.model_fields[name]
        read_by = tuple(each for each in info.metadata if isinstance(each, ReadBy))
        kind = Annotated[(cls, *read_by)] if read_by else cls
        fields[name] = (kind, Field(default=cls(), description=info.description))
    return create_model("Config", __base__=Config, **fields)


def schema_for(values: Mapping[str, object]) -> type[Config]:
    """Return the schema for unvalidated section values; unknown simulators and models have common settings."""
    sections = {name: values.get(name) for name in ("env", "model", *WIDENED)}
    mappings = {
        name: cast(dict[str, object], section) if isinstance(section, dict) else {}
        for name, section in sections.items()
    }
    schema = config_class(**{name: section_class(name, section) for name, section in mappings.items()})
    return with_sections(schema, present_in("", values, schema))


def defaults_of(config: Config) -> Config:
    """Return the defaults for the simulator, model and optional sections of a configuration."""
    return type(config)(**{name: type(getattr(config, name))() for name in ("env", "model", *WIDENED)})
