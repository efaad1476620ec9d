"""The pipeline of a configuration, and whether it has the nodes that other settings need. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from embodrl.config.rules.base import Context
from embodrl.config.schema import Config
from embodrl.errors import EmbodrlError, PipelineError, PipelineProblem
from embodrl.names import import_function, nearest
from embodrl.pipelines.checks import BESIDE
from embodrl.pipelines.graph import Graph, Pipeline
from embodrl.rule_set import Finding, Rule
from embodrl.specs import ADVANTAGES, LOSSES, PIPELINES
from embodrl.user_code import guard_user_code


@dataclass(frozen=True)
class Need:
    """A role tied to a setting.

    Attributes:
        role: role of the node.
        setting: setting that needs it, in words.
        wanted: whether it is needed.
        switch: how to turn the setting off.
        only_then: the node cannot work without the setting.
    """

    role: str
    setting: str
    wanted: Callable[[Config], bool]
    switch: str
    only_then: bool


def _offline(config: Config) -> bool:
    return config.algorithm.loss_type in LOSSES and LOSSES.entry(config.algorithm.loss_type).offline


NEEDS = (
    Need("reference", "algorithm.kl.coef above 0", lambda c: c.algorithm.kl.coef > 0, "algorithm.kl.coef=0", True),
    Need(
        "dynamic_sampling",
        "algorithm.filter.enabled",
        lambda c: c.algorithm.filter.enabled,
        "algorithm.filter.enabled=false",
        True,
    ),
    Need(
        "proximal",
        "algorithm.decoupled with prox=recompute, or algorithm.recompute_logprobs",
        lambda c: c.needs_proximal,
        "algorithm.decoupled.enabled=false and algorithm.recompute_logprobs=false",
        True,
    ),
    Need(
        "store",
        "an off-policy algorithm.loss_type",
        lambda c: c.algorithm.loss_type in LOSSES and LOSSES.entry(c.algorithm.loss_type).off_policy,
        "algorithm.loss_type=actor_critic",
        True,
    ),
    Need(
        "rollout",
        "an algorithm.loss_type that is not offline",
        lambda c: not _offline(c),
        "algorithm.loss_type=iql",
        True,
    ),
    Need("reward", "reward.fn", lambda c: c.reward.fn is not None, "reward.fn=null", False),
    Need(
        "reward",
        "reward.model",
        lambda c: c.reward.model is not None and not _offline(c),  # offline: the dataset provides the rewards
        "reward.model=null",
        False,
    ),
    Need(
        "reward",
        "algorithm.srpo.enabled",
        lambda c: c.algorithm.srpo.enabled,
        "algorithm.srpo.enabled=false",
        False,
    ),
)


def default_name(config: Config) -> str:
    """Return the name of the loss's built-in pipeline."""
    name = config.algorithm.loss_type
    loss = LOSSES.entry(name) if name in LOSSES else None
    if loss is None or not loss.learns_from_records:
        return "on_policy"
    if loss.offline:
        return "offline"
    return "dagger" if loss.imitates else "off_policy"


def algorithm_name(config: Config) -> str:
    """Return the algorithm's name for runs and model cards; a registered pipeline's name replaces it."""
    pipeline = config.pipeline.name
    if pipeline is not None and pipeline not in PIPELINES.builtin:
        return pipeline
    algorithm = config.algorithm
    learner = default_name(config)
    marks = (
        ("srpo", algorithm.srpo.enabled),
        ("dapo", algorithm.filter.enabled),
        ("cpgd", algorithm.surrogate == "log_ratio"),
        (algorithm.loss_type, learner in ("offline", "dagger")),
        ("opd", algorithm.adv_type == "zero"),
        ("sac", learner == "off_policy"),
        ("ppo", algorithm.adv_type == "gae"),
        ("gspo", algorithm.length_normalized_ratio),
        (algorithm.adv_type, ":" not in algorithm.adv_type),
    )
    custom = "ppo" if ADVANTAGES.entry(algorithm.adv_type).needs_values else "grpo"
    return next((name for name, holds in marks if holds), custom)


def make_pipeline(config: Config) -> Pipeline:
    """Return the pipeline that ``pipeline.fn``, ``pipeline.name`` or the algorithm's settings name.

    Raises:
        EmbodrlError: the pipeline does not exist, or the user's function failed.
    """
    path = config.pipeline.fn
    if path is None:
        return PIPELINES.get(config.pipeline.name or default_name(config))(config)
    function = import_function(path)
    try:
        with guard_user_code(path):
            made = function(config)
    except EmbodrlError:
        raise
    except Exception as error:  # a user's function may raise anything
        message = f"{path} raised {type(error).__name__}: {error}"
        raise EmbodrlError(message, "it is called with one argument, the Config", code="pipeline-fn-raised") from error
    if not isinstance(made, Pipeline):
        hint = "return the Pipeline itself; embodrl builds it"
        raise EmbodrlError(f"{path} returned {type(made).__name__}, not a Pipeline", hint, code="pipeline-fn-type")
    return made


def unmet_needs(pipeline: Pipeline, config: Config) -> list[PipelineProblem]:
    """Return the mismatches between the nodes of a pipeline and the other settings."""
    problems: list[PipelineProblem] = []
    for need in NEEDS:
        present = need.role in pipeline.roles.values()
        wanted = need.wanted(config)
        if wanted and not present:
            message = f"{need.setting} needs a node with the role '{need.role}', but there is none"
            hint = f"add one, e.g. embodrl.pipelines.nodes:{need.role}; remove pipeline.name; or set {need.switch}"
            problems.append(PipelineProblem("", message, hint, code="pipeline-role-needed"))
        elif present and need.only_then and not wanted:
            message = f"a node has the role '{need.role}', which needs {need.setting}"
            problems.append(PipelineProblem("", message, "set it, or remove the node", code="pipeline-role-unused"))
    return [*problems, *_wrong_order(pipeline, config)]


def _wrong_order(pipeline: Pipeline, config: Config) -> Iterator[PipelineProblem]:
    """Yield nodes that use another node's results but do not come after it."""
    in_reward = config.algorithm.kl.placement == "reward"
    users = {"proximal": ("advantage", "train"), "reference": ("advantage", "train") if in_reward else ("train",)}
    for name, role in pipeline.roles.items():
        before = pipeline.upstream(name)
        for giver, given in pipeline.roles.items():
            if role in users.get(given, ()) and giver not in before:
                message = f"needs what '{giver}' adds to the batch, but does not come after it"
                hint = f"take its batch from '{giver}', directly or through other nodes"
                yield PipelineProblem(name, message, hint, code="pipeline-order")


def _misplaced(pipeline: Pipeline, config: Config) -> Iterator[PipelineProblem]:
    """Yield nodes of ``pipeline.placement`` that are not there, or can't run in processes of their own."""
    for name in config.pipeline.placement:
        role = pipeline.roles.get(name)
        if role is None:
            near = nearest(name, list(pipeline.roles))
            hint = f"did you mean '{near}'?" if near else f"name one of {', '.join(pipeline.roles)}"
            yield PipelineProblem(name, "is placed, but does not exist", hint, code="pipeline-placed-unknown")
        elif role not in BESIDE or pipeline.is_built_in(name):
            message = "is placed, but uses the parts of the run"
            roles = ", ".join(BESIDE)
            hint = f"place nodes of your own with the roles {roles}; cluster.component_placement places the parts"
            yield PipelineProblem(name, message, hint, code="pipeline-placed-role")
        elif not pipeline.is_importable(name):
            message = "is placed, but another process can't import its function"
            yield PipelineProblem(name, message, "pass 'module:function'", code="pipeline-placed-function")


def checked_pipeline(config: Config) -> Pipeline:
    """Return the pipeline of a configuration, built once.

    Raises:
        PipelineError: lists every problem.
    """
    try:
        pipeline = make_pipeline(config)
    except PipelineError:
        raise
    except EmbodrlError as error:
        hint = error.hint or "put its directory on PYTHONPATH"
        problem = PipelineProblem("", error.message, hint, error.code)
        raise PipelineError("the pipeline cannot run:", problems=(problem,)) from error
    problems = (*pipeline.problems(), *unmet_needs(pipeline, config), *_misplaced(pipeline, config))
    if problems:
        raise PipelineError("the pipeline cannot run:", problems=problems)
    return pipeline


class PipelineCheck:
    """The rule that the pipeline can be built; keeps the graph, since a custom function must be called only once."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.rule = Rule(self.graph_is_sound, ("pipeline", "algorithm", "reward"))

    def graph_is_sound(self, context: Context) -> Iterator[Finding]:
        """The graph can be built, and has the nodes that the other settings need."""
        config = context.config
        pipeline = config.pipeline
        both = pipeline.name is not None and pipeline.fn is not None
        unknown = pipeline.name is not None and pipeline.name not in PIPELINES
        if both or unknown or config.algorithm.adv_type not in ADVANTAGES:
            return  # other configuration rules report it
        key = "pipeline.name" if pipeline.fn is None else "pipeline.fn"
        try:
            self.graph = build_graph(config)
        except PipelineError as error:
            for problem in error.problems or (PipelineProblem("", error.message, error.hint, error.code),):
                yield Finding(key, str(problem), problem.hint, code=problem.code)


def build_graph(config: Config) -> Graph:
    """Return the graph of a configuration.

    Raises:
        PipelineError: lists every problem.
    """
    return checked_pipeline(config).build()
