"""embodrl: reinforcement learning for vision-language-action models, from a laptop CPU to a cluster.

The names below are the public API; everything else may change without notice. They are imported on first use, so that
``import embodrl`` takes milliseconds and loads no torch.

>>> import embodrl
>>> loaded = embodrl.load_config(["env=toy", "runner.max_iterations=2"])
>>> loaded.config.runner.max_iterations
2
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from embodrl.version import __version__

# Name -> module:attribute, imported on first use. Keep the type-checker imports below in step; a test compares them.
_EXPORTS = {
    # Verbs and their results.
    **dict.fromkeys(
        (
            *("load_config", "train", "evaluate", "collect", "sft", "load_policy", "follow_weights"),
            *("TrainResult", "EvaluationResult", "CollectResult", "SftResult"),
        ),
        "embodrl.api",
    ),
    "Session": "embodrl.session",
    "Config": "embodrl.config.schema",
    **dict.fromkeys(("EnvConfig", "ModelConfig"), "embodrl.config.schema"),
    **dict.fromkeys(("SimulatorSpec", "ModelSpec"), "embodrl.specs"),
    "LoadedConfig": "embodrl.config.load",
    "EpisodeRecord": "embodrl.workers.evaluator",
    # Errors.
    **dict.fromkeys(("EmbodrlError", "ConfigError", "ConfigProblem"), "embodrl.errors"),
    # Records exchanged by policies and environments.
    **dict.fromkeys(
        ("CameraSpec", "EnvSpec", "Observation", "EnvStep", "PolicyOutput", "EvalOutput", "SamplingParams"),
        "embodrl.types",
    ),
    "TrajectoryBatch": "embodrl.data.trajectory",
    # Extension: models.
    "VLAPolicy": "embodrl.models.base",
    "LoadReport": "embodrl.models.load_report",
    "ValueHead": "embodrl.models.common.value_head",
    "checkpoint": "embodrl.models.common.checkpoint:",
    "sampling": "embodrl.models.common.sampling:",
    # Extension: environments.
    "VectorEnv": "embodrl.envs.base",
    **dict.fromkeys(("Simulator", "SimulatorVectorEnv", "SimStep", "Replayed"), "embodrl.envs.simulator"),
    "EpisodeRules": "embodrl.envs.stepping",
    # Extension: algorithms and rewards.
    "Advantages": "embodrl.algorithms.advantages",
    "split_episodes": "embodrl.algorithms.episodes",
    "episode_returns": "embodrl.algorithms.groups",
    "LossCounts": "embodrl.algorithms.losses",
    "LossOutput": "embodrl.algorithms.losses",
    "Episode": "embodrl.workers.episode",
    # Extension: pipelines and workflows.
    "Pipeline": "embodrl.pipelines.graph",
    "PipelineContext": "embodrl.pipelines.context",
    **dict.fromkeys(("RolloutWorkflow", "EpisodeTask", "Trajectory"), "embodrl.workers.workflows.workflow"),
    **dict.fromkeys(("EpisodePlayer", "FinishedEpisode"), "embodrl.workers.workflows.episodes"),
    "ReplayedEpisode": "embodrl.workers.repetition",
    **dict.fromkeys(("Environment", "Tool", "ToolResult"), "embodrl.envs.environment"),
    **dict.fromkeys(("EpisodeEngine", "Completion"), "embodrl.hybrid_engines.rollout.batched"),
    "ToolCall": "embodrl.models.common.chat",
    "McpTools": "embodrl.workers.workflows.mcp_tools",
    # Registries.
    "register_model": "embodrl.models.registry:SupportedModel.register",
    "register_env": "embodrl.envs.registry:SupportedEnv.register",
    "register_advantage": "embodrl.specs:ADVANTAGES.register_function",
    "register_loss": "embodrl.specs:LOSSES.register_function",
    "register_pipeline": "embodrl.specs:PIPELINES.add",
    # Coroutines, and batches of other libraries.
    **dict.fromkeys(("AsyncTaskRunner", "TaskResult"), "embodrl.workers.workflows.task_runner"),
    **dict.fromkeys(
        ("to_verl", "from_verl", "to_areal", "from_areal", "to_areal_list", "from_areal_list"),
        "embodrl.tools.converters.batches",
    ),
}

__all__ = ["__version__", *sorted(_EXPORTS)]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from embodrl.algorithms.advantages import Advantages as Advantages
    from embodrl.algorithms.episodes import split_episodes as split_episodes
    from embodrl.algorithms.groups import episode_returns as episode_returns
    from embodrl.algorithms.losses import LossCounts as LossCounts
    from embodrl.algorithms.losses import LossOutput as LossOutput
    from embodrl.api import CollectResult as CollectResult
    from embodrl.api import EvaluationResult as EvaluationResult
    from embodrl.api import SftResult as SftResult
    from embodrl.api import TrainResult as TrainResult
    from embodrl.api import collect as collect
    from embodrl.api import evaluate as evaluate
    from embodrl.api import follow_weights as follow_weights
    from embodrl.api import load_config as load_config
    from embodrl.api import load_policy as load_policy
    from embodrl.api import sft as sft
    from embodrl.api import train as train
    from embodrl.config.load import LoadedConfig as LoadedConfig
    from embodrl.config.schema import Config as Config
    from embodrl.config.schema import EnvConfig as EnvConfig
    from embodrl.config.schema import ModelConfig as ModelConfig
    from embodrl.data.trajectory import TrajectoryBatch as TrajectoryBatch
    from embodrl.envs.base import VectorEnv as VectorEnv
    from embodrl.envs.environment import Environment as Environment
    from embodrl.envs.environment import Tool as Tool
    from embodrl.envs.environment import ToolResult as ToolResult
    from embodrl.envs.registry import SupportedEnv
    from embodrl.envs.simulator import Replayed as Replayed
    from embodrl.envs.simulator import SimStep as SimStep
    from embodrl.envs.simulator import Simulator as Simulator
    from embodrl.envs.simulator import SimulatorVectorEnv as SimulatorVectorEnv
    from embodrl.envs.stepping import EpisodeRules as EpisodeRules
    from embodrl.errors import ConfigError as ConfigError
    from embodrl.errors import ConfigProblem as ConfigProblem
    from embodrl.errors import EmbodrlError as EmbodrlError
    from embodrl.hybrid_engines.rollout.batched import Completion as Completion
    from embodrl.hybrid_engines.rollout.batched import EpisodeEngine as EpisodeEngine
    from embodrl.models.base import VLAPolicy as VLAPolicy
    from embodrl.models.common import checkpoint as checkpoint
    from embodrl.models.common import sampling as sampling
    from embodrl.models.common.chat import ToolCall as ToolCall
    from embodrl.models.common.value_head import ValueHead as ValueHead
    from embodrl.models.load_report import LoadReport as LoadReport
    from embodrl.models.registry import SupportedModel
    from embodrl.pipelines.context import PipelineContext as PipelineContext
    from embodrl.pipelines.graph import Pipeline as Pipeline
    from embodrl.session import Session as Session
    from embodrl.specs import ADVANTAGES, LOSSES, PIPELINES
    from embodrl.specs import ModelSpec as ModelSpec
    from embodrl.specs import SimulatorSpec as SimulatorSpec
    from embodrl.tools.converters.batches import from_areal as from_areal
    from embodrl.tools.converters.batches import from_areal_list as from_areal_list
    from embodrl.tools.converters.batches import from_verl as from_verl
    from embodrl.tools.converters.batches import to_areal as to_areal
    from embodrl.tools.converters.batches import to_areal_list as to_areal_list
    from embodrl.tools.converters.batches import to_verl as to_verl
    from embodrl.types import CameraSpec as CameraSpec
    from embodrl.types import EnvSpec as EnvSpec
    from embodrl.types import EnvStep as EnvStep
    from embodrl.types import EvalOutput as EvalOutput
    from embodrl.types import Observation as Observation
    from embodrl.types import PolicyOutput as PolicyOutput
    from embodrl.types import SamplingParams as SamplingParams
    from embodrl.workers.episode import Episode as Episode
    from embodrl.workers.evaluator import EpisodeRecord as EpisodeRecord
    from embodrl.workers.repetition import ReplayedEpisode as ReplayedEpisode
    from embodrl.workers.workflows.episodes import EpisodePlayer as EpisodePlayer
    from embodrl.workers.workflows.episodes import FinishedEpisode as FinishedEpisode
    from embodrl.workers.workflows.mcp_tools import McpTools as McpTools
    from embodrl.workers.workflows.task_runner import AsyncTaskRunner as AsyncTaskRunner
    from embodrl.workers.workflows.task_runner import TaskResult as TaskResult
    from embodrl.workers.workflows.workflow import EpisodeTask as EpisodeTask
    from embodrl.workers.workflows.workflow import RolloutWorkflow as RolloutWorkflow
    from embodrl.workers.workflows.workflow import Trajectory as Trajectory

    register_model = SupportedModel.register
    register_env = SupportedEnv.register
    register_advantage = ADVANTAGES.register_function
    register_loss = LOSSES.register_function
    register_pipeline = PIPELINES.add


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    module, separator, path = _EXPORTS[name].partition(":")
    found = importlib.import_module(module)
    for part in (path or ("" if separator else name)).split("."):
        found = getattr(found, part) if part else found
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
