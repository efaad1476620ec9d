"""Input of the configuration rules."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, TypeVar, cast

from embodrl.config.nodes import Node, Origin, lookup, origin_of
from embodrl.config.schema import Config, EnvConfig, ModelConfig, defaults_of
from embodrl.deployment import Deployment, Solution
from embodrl.errors import ConfigProblem, EmbodrlError
from embodrl.names import import_object
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import (
    ADVANTAGES,
    ENGINES,
    ENVS,
    LAUNCHERS,
    LOSSES,
    MODELS,
    EngineSpec,
    FunctionSpec,
    LauncherSpec,
    ModelSpec,
    SimulatorSpec,
)

E = TypeVar("E", bound=EnvConfig)
M = TypeVar("M", bound=ModelConfig)


@dataclass(frozen=True)
class Context:
    """A configuration with valid types, and the origins of its values.

    Attributes:
        config: the typed values.
        tree: values with origins.
        solution: result of the placement.
        resuming: whether the weights come from a checkpoint.
        verb: verb that the configuration is for; None for any.
        made_before: paths that earlier stages of a recipe will create.
        choices: preset group -> preset, as far as the user chose.
    """

    config: Config
    tree: Node
    solution: Solution
    resuming: bool = False
    verb: str | None = None
    made_before: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def collecting(self) -> bool:
        """Whether an expert acts, so that demonstrations need one and the policy's weights do not matter."""
        return self.verb == "collect"

    @property
    def deployment(self) -> Deployment | None:
        """Placement of all components; None if unknown, which separate rules report."""
        return self.solution.found

    @property
    def gathers_in_processes(self) -> bool:
        """Whether a run's rollouts are in processes of their own; what only acts may be there whatever learns."""
        return (
            self.verb not in ("eval", "collect", "record")
            and self.deployment is not None
            and self.deployment.rolls_out_in_processes
        )

    @property
    def trains_collectively(self) -> bool | None:
        """Whether processes that train wait for each other; None if the placement is unknown."""
        if self.config.cluster.controllers > 1:
            return True
        return None if self.deployment is None else self.deployment.trains_in_processes

    @cached_property
    def _defaults(self) -> Any:
        """Defaults of the sections for this simulator and model."""
        return json.loads(defaults_of(self.config).model_dump_json())

    @property
    def simulator(self) -> SimulatorSpec | None:
        """Spec of ``env.env_type``; None if it is unknown."""
        name = self.config.env.env_type
        return ENVS.entry(name) if name in ENVS else None

    @property
    def family(self) -> ModelSpec | None:
        """Spec of ``model.model_type``; None if it is unknown."""
        name = self.config.model.model_type
        return MODELS.entry(name) if name in MODELS else None

    @property
    def training_engine(self) -> EngineSpec:
        """Spec of ``actor.training_backend``, whose name was checked."""
        return ENGINES.entry(self.config.actor.training_backend)

    @property
    def rollout_engine(self) -> EngineSpec:
        """Spec of ``rollout.backend``, whose name was checked."""
        return ENGINES.entry(self.config.rollout.backend)

    @property
    def launcher(self) -> LauncherSpec:
        """Spec of ``cluster.launcher``, whose name was checked."""
        return LAUNCHERS.entry(self.config.cluster.launcher)

    @property
    def estimator(self) -> FunctionSpec:
        """Spec of the advantage estimator; an empty one if the name is unknown."""
        return _estimator(self.config.algorithm.adv_type)

    @property
    def estimators(self) -> dict[str, FunctionSpec]:
        """Specs of the advantage estimators in use, with those of single tasks, by the key that names each."""
        algorithm = self.config.algorithm
        own = {
            f"algorithm.by_task.{index}.adv_type": (each.task, _estimator(each.adv_type))
            for index, each in enumerate(algorithm.by_task)
            if each.adv_type is not None
        }
        others = set(self.config.env.tasks) - {task for task, _ in own.values()}
        general = {"algorithm.adv_type": self.estimator} if others or not own else {}
        return general | {key: spec for key, (_, spec) in own.items()}

    @property
    def grouped_by(self) -> str:
        """Key of the first estimator that compares the episodes of a group; "" if none does."""
        return next((key for key, spec in self.estimators.items() if spec.needs_groups), "")

    @property
    def loss(self) -> FunctionSpec:
        """Spec of the loss; an empty one if the name is unknown."""
        name = self.config.algorithm.loss_type
        return LOSSES.entry(name) if name in LOSSES else FunctionSpec(name=name, target=name)

    def env(self, settings: type[E]) -> E:
        assert isinstance(self.config.env, settings)
        return self.config.env

    def model(self, settings: type[M]) -> M:
        assert isinstance(self.config.model, settings)
        return self.config.model

    def origin(self, key: str) -> Origin:
        """Return the origin of a value, or of the list or section that contains it."""
        return origin_of(self.tree, key) if lookup(self.tree, key) else Origin("schema")

    def by_user(self, key: str) -> bool:
        """Return whether the user set this value: on the command line, or in a file to other than the default."""
        node = lookup(self.tree, key)
        if node is None:
            return False
        if node.children:
            return any(self.by_user(f"{key}.{name}") for name in node.children)
        default = self._defaults
        for part in key.split("."):
            default = cast(dict[str, object], default).get(part) if isinstance(default, dict) else None
        return node.origin.kind == "argument" or (node.origin.by_user and node.plain() != default)

    def problem(self, finding: Finding, code: str) -> ConfigProblem:
        """Return the finding with origins, and with the rule's code unless it has its own."""
        keys = (finding.at or finding.key, *finding.others)
        origin = (
            "\n".join(f"{key}: {self.origin(key)}" for key in keys) if finding.others else str(self.origin(keys[0]))
        )
        return ConfigProblem(
            finding.key, finding.message, origin, finding.allowed, finding.nearest, finding.hint, finding.code or code
        )


def _estimator(name: str) -> FunctionSpec:
    return ADVANTAGES.entry(name) if name in ADVANTAGES else FunctionSpec(name=name, target=name)


CORE = RuleSet()
RULES = CORE.rules
NOTES = CORE.notes
rule = CORE.rule
note = CORE.note


def value_of(config: Config, key: str) -> object:
    """Return the value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def teacher_is_apart(config: Config) -> bool | None:
    """Return whether ``algorithm.teacher`` is a network of its own; None without a readable teacher.

    Files that can't be read are reported by the rules of checkpoints.
    """
    if config.algorithm.teacher is None or not config.algorithm.kl.coef:
        return None
    # By its name: it may build networks, and so imports torch.
    is_apart = cast("Callable[[Config], bool]", import_object("embodrl.models.common.teacher:is_apart"))
    try:
        return is_apart(config)
    except EmbodrlError:
        return None


def path_kind(text: str) -> str:
    """Return ``directory``, ``file`` or "" (nothing) for a path; ~ is the home directory."""
    try:
        path = Path(text).expanduser()
        return "directory" if path.is_dir() else "file" if path.exists() else ""
    except (OSError, RuntimeError, ValueError):  # name too long, unknown user or zero byte: no such path
        return ""


def multiples(value: int, of: int) -> str:
    """Return the nearest multiples below and above, in words."""
    below = value // of * of
    above = (value // of + 1) * of
    return f"{below} or {above}" if below else str(above)


def divisors(of: int, near: int) -> str:
    """Return the divisors of ``of`` nearest to ``near``, below and above, in words."""
    all_divisors = [n for n in range(1, min(of, 100_000) + 1) if of % n == 0]
    below = max((n for n in all_divisors if n <= near), default=1)
    above = min((n for n in all_divisors if n > near), default=below)
    return f"{below} or {above}" if below != above else str(below)
