"""The typed configuration, without logic: one module per section. Imports no torch.

Every field's description is its documentation: `embodrl explain KEY` and the reference of the site show it.
"""

from embodrl.config.schema.algorithm import (
    AlgorithmConfig,
    BranchConfig,
    DaggerConfig,
    DecoupledConfig,
    FilterConfig,
    KlConfig,
    OffPolicyConfig,
    SamplingConfig,
    SrpoConfig,
    TaskAlgorithmConfig,
)
from embodrl.config.schema.cluster import ClusterConfig, HardwareConfig, NodeGroupConfig
from embodrl.config.schema.config import Config, algorithm_of, config_class, defaults_of, schema_for, section_class
from embodrl.config.schema.engines import (
    ActorConfig,
    FsdpConfig,
    OptimConfig,
    RolloutConfig,
)
from embodrl.config.schema.env import (
    CameraConfig,
    CurriculumConfig,
    EnvConfig,
    EnvEvalConfig,
    EnvTrainConfig,
    TaskCurriculumConfig,
    TaskPartConfig,
    VideoConfig,
)
from embodrl.config.schema.model import LoraConfig, ModelConfig, SmallActorConfig, ValueHeadConfig
from embodrl.config.schema.optional import present_in, section_in, sections_of, with_sections
from embodrl.config.schema.real_time import DEVICES
from embodrl.config.schema.run import (
    CollectConfig,
    LoggerConfig,
    PipelineConfig,
    RecipeConfig,
    RewardConfig,
    RunnerConfig,
    SftConfig,
)
from embodrl.config.schema.section import (
    AppliesIf,
    Fraction,
    GroupRanks,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Ranks,
    Section,
    Seed,
)
from embodrl.config.schema.serve import GrootKeysConfig, ServeConfig, WireKeysConfig
from embodrl.config.schema.tagged import env_settings, model_settings

__all__ = [
    "DEVICES",
    "ActorConfig",
    "AlgorithmConfig",
    "AppliesIf",
    "BranchConfig",
    "CameraConfig",
    "ClusterConfig",
    "CollectConfig",
    "Config",
    "CurriculumConfig",
    "DaggerConfig",
    "DecoupledConfig",
    "EnvConfig",
    "EnvEvalConfig",
    "EnvTrainConfig",
    "FilterConfig",
    "Fraction",
    "FsdpConfig",
    "GrootKeysConfig",
    "GroupRanks",
    "HardwareConfig",
    "KlConfig",
    "LoggerConfig",
    "LoraConfig",
    "ModelConfig",
    "NodeGroupConfig",
    "NonNegativeFloat",
    "NonNegativeInt",
    "OffPolicyConfig",
    "OptimConfig",
    "PathText",
    "PipelineConfig",
    "PositiveFloat",
    "PositiveInt",
    "Ranks",
    "RecipeConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunnerConfig",
    "SamplingConfig",
    "Section",
    "Seed",
    "ServeConfig",
    "SftConfig",
    "SmallActorConfig",
    "SrpoConfig",
    "TaskAlgorithmConfig",
    "TaskCurriculumConfig",
    "TaskPartConfig",
    "ValueHeadConfig",
    "VideoConfig",
    "WireKeysConfig",
    "algorithm_of",
    "config_class",
    "defaults_of",
    "env_settings",
    "model_settings",
    "present_in",
    "schema_for",
    "section_class",
    "section_in",
    "sections_of",
    "with_sections",
]
