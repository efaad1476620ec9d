"""What embodrl knows about simulators, model families, algorithms and pipelines: one spec each, without torch.

Built-in specs stand with what they describe, e.g. ``embodrl/envs/<simulator>/spec.py``, and are listed in one table per
kind, e.g. ``embodrl/envs/registry.py``. Others come from a module named in ``extensions``, or from an installed package
with an entry point in the group of the kind, e.g. ``embodrl.envs``. Each is imported when its name is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

from embodrl.errors import EmbodrlError
from embodrl.names import import_function, import_object, nearest, parameters_of
from embodrl.registry import Entry, Registry

if TYPE_CHECKING:
    from typing import Self  # simulators may live in a Python 3.10, which lacks it

    from embodrl.config.schema.section import Section
    from embodrl.interface import Interface
    from embodrl.rule_set import RuleSet

DEFAULT_ENV = "maniskill"
DEFAULT_MODEL = "openvla"

REWARD_MODES = ("dense_delta", "potential", "dense", "sparse")
"""Values of ``env.reward_mode``."""
READABLE = (
    *("cameras", "image_size", "include_images", "state", "reward_mode", "success_bonus", "render_detail"),
    *("action_dim", "video"),
)
"""Common settings that only some VectorEnv classes take as constructor arguments."""


@dataclass(frozen=True, kw_only=True)
class Spec(Entry):
    """What the specs of simulators and model families have in common.

    Attributes:
        actions: what an action means, for ``embodrl list``.
        rules: checks of the configuration that run when this spec is chosen.
    """

    actions: str = ""
    rules: tuple[RuleSet, ...] = ()

    COUNTS: ClassVar[tuple[str, ...]] = ()
    """Facts that are integers above 0, or None."""
    FLAGS: ClassVar[tuple[str, ...]] = ()
    """Facts that are true or false."""
    NAMES: ClassVar[tuple[str, ...]] = ()
    """Facts that are tuples of text, or None."""

    def __post_init__(self) -> None:
        for name in (*self.COUNTS, *self.FLAGS, *self.NAMES):
            value: object = getattr(self, name)
            if name in self.NAMES and isinstance(value, list):
                value = tuple(cast(list[object], value))
                object.__setattr__(self, name, value)
            wanted = self._expected(name, value)
            if wanted:
                raise EmbodrlError(
                    f"fact {name}={value!r} of '{self.name}' is invalid", f"give {wanted}", code="spec-fact-invalid"
                )

    def _expected(self, name: str, value: object) -> str:
        """Return what a fact should be, or "" if it is that."""
        if name in self.FLAGS:
            return "" if isinstance(value, bool) else "True or False"
        if name in self.COUNTS:
            is_count = value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
            return "" if is_count else "an integer above 0, or None"
        items = cast(tuple[object, ...], value) if isinstance(value, tuple) else (None,)
        is_names = value is None or all(isinstance(item, str) for item in items)
        return "" if is_names else "a list of names"


EXAMPLE_CAMERA: dict[str, object] = {
    **{"name": "camera", "height": 64, "width": 64},
    **{"fov_rad": None, "eye": None, "target": None},
}
"""For the ``example`` of a ``SimulatorSpec``."""


@dataclass(frozen=True)
class TaskSuite:
    """Tasks that are evaluated together.

    Attributes:
        max_episode_steps: step limit of published evaluations.
        tasks: name -> instruction, in the suite's order.
    """

    max_episode_steps: int
    tasks: Mapping[str, str]


@dataclass(frozen=True)
class Axis:
    """A way in which `embodrl eval axes=...` perturbs the episodes of a simulator.

    Attributes:
        group: vision, semantics or execution.
        description: what is changed, and how far.
        tasks: those that have it; None: all.
    """

    group: str
    description: str
    tasks: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SimulatorSpec(Spec):
    """A simulator, or any other source of environments.

    Attributes:
        settings: the class of the section ``env``, derived from ``EnvConfig``, or ``module:Class``; None adds nothing.
            The settings that it adds are passed to ``target`` as keyword arguments.
        reads: common settings, of ``READABLE``, that ``target`` takes as keyword arguments as well.
        tasks: names, or name -> instruction, or where that mapping is as ``module:attribute``; empty: any name.
        suites: name -> tasks that belong together.
        derive: from the given settings of the section ``env`` to others that follow from them where they are not
            given, and the name of the setting that they follow from.
        simulates: there is something to act in; False of mere data, on which only `embodrl sft` runs.
        fill: from all given settings to the key that further ones follow from, and those (dotted key -> value); they
            are set where the user has not.
        robots: names of its robots in datasets; None: not checked.
        control_hz: actions per second; None: not known before it is started.
        action_dim: numbers of an action; None if the configuration says it.
        batched_by: setting and value with which one process simulates all environments.
        gpu_settings: settings with the value that needs a GPU.
        reward_modes: values of ``env.reward_mode`` that it has; None: all but ``potential``.
        cameras: names of cameras with a pose; None: any name.
        posed_cameras: cameras of other names can be placed with eye and target.
        camera_poses: the pose and field of view of cameras can be set.
        max_cameras: None for no limit.
        needs: Python modules.
        extra: of embodrl, which installs them.
        isolated: ``embodrl env install NAME`` installs it into a Python environment of its own.
        imports: modules whose import proves there that the packages fit each other.
        draws_with: vulkan, mujoco, or "" if nothing is checked.
        probe: ``probe(settings, python)``, from the section ``env`` (None: `embodrl doctor` without a configuration)
            and the simulators' interpreter (None: this one) to pairs of what is missing and how to get it; or
            ``module:function``. Called before anything is started, so it has to be quick.
        warnings: ``module:function`` from the simulators' interpreter (None: this one) to triples of a name, what is
            odd there although it runs, and a hint.
        example: keyword arguments of ``target`` (without ``num_envs``) for the environment that `embodrl doctor` makes.
        process_bytes: memory of a simulator process without environments.
        env_bytes: memory of an environment.
        expert_tasks: tasks with a scripted expert; None: all tasks.
        demonstrations: where demonstrations come from if there is no expert.
        interface: from the section ``env`` to what actions and observations mean; None: not stated.
        axes: name -> perturbation that ``VectorEnv.set_axis`` takes.
        own_settings: hint for a setting that it has not, where what it simulates may have one of that name.
        camera_list, experts, verified: for ``embodrl list``.
    """

    settings: type[Section] | str | None = None
    reads: tuple[str, ...] = ("cameras",)
    tasks: tuple[str, ...] | list[str] | Mapping[str, str] | str = ()
    suites: Mapping[str, TaskSuite] = field(default_factory=dict[str, TaskSuite])
    derive: Callable[[Mapping[str, object]], tuple[dict[str, object], str]] | None = None
    simulates: bool = True
    fill: Callable[[object], tuple[str, dict[str, object]]] | None = None
    robots: tuple[str, ...] | None = None
    control_hz: float | None = None
    action_dim: int | None = None
    batched_by: tuple[str, str] | None = None
    gpu_settings: Mapping[str, str] = field(default_factory=dict[str, str])
    reward_modes: tuple[str, ...] | None = None
    cameras: tuple[str, ...] | None = None
    posed_cameras: bool = True
    camera_poses: bool = True
    max_cameras: int | None = None
    needs: tuple[str, ...] = ()
    extra: str = ""
    isolated: bool = False
    imports: tuple[str, ...] = ()
    draws_with: str = ""
    probe: Callable[[Any, str | None], Sequence[tuple[str, str]]] | str | None = None
    warnings: str = ""
    example: Mapping[str, object] | None = None
    process_bytes: int = 0
    env_bytes: int = 0
    expert_tasks: tuple[str, ...] | None = None
    demonstrations: str = ""
    interface: Callable[[Any], Interface] | None = None
    axes: Mapping[str, Axis] = field(default_factory=dict[str, Axis])
    own_settings: str = ""
    camera_list: str = ""
    experts: str = ""
    verified: str = ""

    COUNTS = ("action_dim", "max_cameras")
    FLAGS = ("simulates", "posed_cameras", "camera_poses", "isolated")
    NAMES = ("reads", "robots", "reward_modes", "cameras", "needs", "expert_tasks")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.reads:
            if name not in READABLE:
                near = nearest(name, list(READABLE))
                own = "declare a setting of your own in a class derived from EnvConfig, and register settings=ThatClass"
                raise EmbodrlError(
                    f"'{name}' is not a common setting that '{self.name}' could read; there are {', '.join(READABLE)}",
                    f"did you mean '{near}'? Or {own}" if near else own,
                    code="spec-fact-invalid",
                )

    def axes_of(self, tasks: Sequence[str]) -> dict[str, Axis]:
        """Return the axes that all of these tasks have."""
        return {name: axis for name, axis in self.axes.items() if axis.tasks is None or set(tasks) <= set(axis.tasks)}

    def instructions(self) -> dict[str, str]:
        """Return the tasks with their instructions ("" if unknown); empty if any name will do."""
        found: Any = import_object(self.tasks) if isinstance(self.tasks, str) else self.tasks
        if isinstance(found, Mapping):
            return {str(task): str(text) for task, text in found.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return dict.fromkeys(found, "")


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    """A model family. ``target`` is called as ``build(config, device=..., dtype=..., seed=...)``.

    Attributes:
        settings: the class of the section ``model``, derived from ``ModelConfig``, or ``module:Class``; None adds
            nothing.
        kind: ``tokens`` (action bins), ``sequence`` (tokens of a whole chunk), ``flow`` (flow matching), ``gaussian``
            (no language) or "" (any other).
        value_head: it has one, which actor-critic losses need.
        value_inputs: values of ``model.value_head.input`` that it has; None: not checked.
        trainable: values of ``model.trainable`` that it has; None: not checked.
        uses_state: it reads the robot's state; the name of a setting where that decides; None: unknown.
        uses_images: it reads the pictures; the name of a setting where that decides.
        max_cameras: pictures that it takes; None for no limit.
        num_bins: of an action token.
        autoregressive: it decodes one action token after the other, as vLLM does.
        keeps_vision_features: a chunk records the features of frozen vision in place of the pictures.
        off_policy: it derives from ``OffPolicyActor``: its actions are re-parameterised, as sac and rlpd need.
        recognizes: whether the content of a config.json is of this family; None: never.
        public_layout: it derives from ``PublicLayout``: `embodrl model random` writes checkpoints of its layout.
        public_preset: preset of ``model`` with the dimensions of the published weights.
        tensor_parallel: the training backend megatron has its layers.
        builtin_warm_start: embodrl ships weights of the tiny size.
        parity: ``module:function`` that compares it with recordings of the reference implementation, for `embodrl
            parity`, which knows the built-in families itself. It takes the fixture's directory and, with ``--device
            cuda``, ``device``.
        num_parameters: from the section ``model`` to about how many parameters a model without a checkpoint has.
        missing_config: hint for a directory with weights and no config.json, if public tools write such ones.
        interface: from a configuration with a checkpoint not written by embodrl to what is known of its conventions;
            None: nothing.
        only_acts: where its network is, if that is not here: it has no gradients, and can only be evaluated.
        sizes, checkpoint, rl: for ``embodrl list``.
    """

    settings: type[Section] | str | None = None
    kind: str = ""
    value_head: bool = True
    value_inputs: tuple[str, ...] | None = None
    trainable: tuple[str, ...] | None = None
    uses_state: bool | str | None = None
    uses_images: bool | str = True
    max_cameras: int | None = None
    num_bins: int | None = None
    autoregressive: bool = False
    keeps_vision_features: bool = False
    off_policy: bool = False
    recognizes: Callable[[Mapping[str, object]], bool] | None = None
    public_layout: bool = False
    public_preset: str = ""
    tensor_parallel: bool = False
    builtin_warm_start: bool = False
    parity: str = ""
    num_parameters: Callable[[Any], int] | None = None
    missing_config: str = ""
    interface: Callable[[Any], Interface | None] | None = None
    only_acts: str = ""
    sizes: str = ""
    checkpoint: str = ""
    rl: str = ""

    COUNTS = ("max_cameras", "num_bins")
    FLAGS = (
        *("value_head", "autoregressive", "keeps_vision_features", "off_policy", "public_layout", "tensor_parallel"),
        "builtin_warm_start",
    )
    NAMES = ("value_inputs", "trainable")


@dataclass(frozen=True, kw_only=True)
class FunctionSpec(Entry):
    """An advantage estimator or a loss; what validation needs to know about it.

    Attributes:
        needs_values: it works with the values of a critic.
        needs_groups: it compares episodes of a group.
        off_policy: it learns from a replay buffer, by critics of its own; of an estimator: there are no advantages.
        offline: it learns from a dataset, without rollouts.
        imitates: what it learns from the buffer are an expert's labels, without critics.
        ignores: settings of the section ``algorithm`` that it does not read.
        parameters: what a custom function names in its signature, and so gets; None for what reads all there is.
        family_kind: kind of the model families that it works with; "" for all.
        parts: ``module:function`` that makes the parts of a run with this loss, as ``embodrl.trainer.parts.build``
            does; None for what learns from rollouts.
        rules: checks of the configuration that run when it is chosen.
        settings: the class of the section ``algorithm.NAME``, derived from ``Section``, or ``module:Class``, whose
            fields are arguments; None: there is none.
        section: name of that section, where several functions share it; "" for the function's own.
    """

    needs_values: bool = False
    needs_groups: bool = False
    off_policy: bool = False
    offline: bool = False
    imitates: bool = False
    ignores: tuple[str, ...] = ()
    parameters: tuple[str, ...] | None = None
    family_kind: str = ""
    parts: str | None = None
    rules: tuple[RuleSet, ...] = ()
    settings: type[Section] | str | None = None
    section: str = ""

    @property
    def learns_from_records(self) -> bool:
        """It needs no advantages of a rollout."""
        return self.off_policy or self.offline


@dataclass(frozen=True)
class FunctionArguments:
    """What functions of one kind are called with, by name.

    Attributes:
        names: of all arguments.
        values: those that only a critic provides.
        groups: those that only groups of episodes provide.
    """

    names: tuple[str, ...]
    values: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PipelineSpec(Entry):
    """A pipeline. ``target`` is called with the configuration and returns a ``Pipeline``."""


@dataclass(frozen=True, kw_only=True)
class ProtocolSpec(Entry):
    """How published success rates were measured: settings that ``protocol=NAME`` gives in place of the presets'.

    Attributes:
        env_type: the environment that it is about.
        source: where it is written down.
        settings: dotted key -> value, whatever the model.
        models: model family -> further settings.
        step_limits: model family, or "" for the others -> suite -> ``env.max_episode_steps``.
        episodes_per_task: of an evaluation.
        camera_px: height and width of all cameras, in pixels.
        differs: what it does that embodrl does not repeat; "" for nothing that is known.
    """

    target: Callable[..., object] | str = ""
    env_type: str
    source: str
    settings: Mapping[str, object]
    models: Mapping[str, Mapping[str, object]] = field(default_factory=dict[str, Mapping[str, object]])
    step_limits: Mapping[str, Mapping[str, int]]
    episodes_per_task: int
    camera_px: int
    differs: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Entry):
    """A training backend, a rollout backend, or both under one name.

    Attributes:
        training: ``module:function`` from the policy, the configuration and the device mesh of the training processes
            to a ``PolicyTrainEngine``, called in each of them (``native`` trains in the driver as well, and without a
            mesh); None if it does not train.
        rollout: ``module:function`` from ``RolloutParts`` to a ``RolloutEngine``; None if it does not act.
        training_settings: the class of the section ``actor.NAME``, derived from ``Section``, or ``module:Class``.
        rollout_settings: the class of the section ``rollout.NAME``; likewise.
        rules: checks of the configuration that run when it is chosen.
        shards: its training processes hold parts of the weights, with which no rollout can act.
        trains_adapters: it trains ``model.trainable: lora``.
        every_update: it runs every update; False: updates by rollouts alone, and not `embodrl sft`.
        keeps_masters: it heeds ``actor.optim.master_weights``.
        frees_gradients: ``actor.enable_offload`` drops gradients, and does not move them.
        training_memory: ``module:function`` from configuration, deployment, ``ModelFigures`` and the bytes of the
            reference to the bytes of one training process by component; "" for shares as of fsdp.
        own_weights: what acts has a copy of the weights, even in the process that trains.
        decodes_all: as it acts, every way of decoding that the model family has is there.
    """

    target: Callable[..., object] | str = ""
    training: Callable[..., object] | str | None = None
    rollout: Callable[..., object] | str | None = None
    training_settings: type[Section] | str | None = None
    rollout_settings: type[Section] | str | None = None
    rules: tuple[RuleSet, ...] = ()
    shards: bool = False
    trains_adapters: bool = True
    every_update: bool = True
    keeps_masters: bool = True
    frees_gradients: bool = True
    training_memory: str = ""
    own_weights: bool = False
    decodes_all: bool = True


@dataclass(frozen=True, kw_only=True)
class ServeProtocolSpec(Entry):
    """A protocol of `embodrl serve`. ``target`` is a class derived from ``Listener``.

    Attributes:
        settings: the class of the section ``serve.NAME``, derived from ``WireKeysConfig``, or ``module:Class``.
        rules: checks of the configuration that run when it is served.
        has_tls: its clients can speak TLS.
        client: class derived from ``Client`` with which model=remote asks such a server, or ``module:Class``; None:
            there is none.
        schemes: of the URLs that it is for, e.g. ``ws``.
    """

    settings: type[Section] | str | None = None
    rules: tuple[RuleSet, ...] = ()
    has_tls: bool = True
    client: Callable[..., object] | str | None = None
    schemes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkflowRunnerSpec(Entry):
    """What plays the episodes of workflows. ``target`` is a class whose arguments are those of ``LockstepRunner``.

    Attributes:
        collector: class derived from ``SyncCollector``, for synchronous runs, as ``module:Class``.
    """

    collector: str = ""


@dataclass(frozen=True, kw_only=True)
class SmallActorSpec(Entry):
    """A small actor that learns on a frozen policy.

    ``target`` is a class with the class methods ``base_config`` and ``build`` of
    ``embodrl.models.small_actors.on_frozen.OnFrozenPolicy``.

    Attributes:
        update: class derived from ``OffPolicyUpdate`` that trains it, as ``module:Class``; None: ``OffPolicyUpdate``.
        settings: the class of the section ``model.NAME``, derived from ``Section``, or ``module:Class``.
        rules: checks of the configuration that run when it is chosen.
    """

    update: str | None = None
    settings: type[Section] | str | None = None
    rules: tuple[RuleSet, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LauncherSpec(Entry):
    """What starts actor and rollout processes. ``target`` is a class derived from ``Launcher``.

    Attributes:
        settings: the class of the section ``cluster.NAME``, derived from ``Section``, or ``module:Class``.
        rules: checks of the configuration that run when it is chosen.
        starts_everything: even what could be done in the main process runs in one that it starts.
        many_machines: it starts processes on other machines, too.
        for_runs: ``cluster.launcher`` may name it; False: only worker groups in a program of one's own.
    """

    settings: type[Section] | str | None = None
    rules: tuple[RuleSet, ...] = ()
    starts_everything: bool = False
    many_machines: bool = False
    for_runs: bool = True


@dataclass(frozen=True, kw_only=True)
class VerbSpec(Entry):
    """A verb of the command line. ``target`` is a function whose parameters are typer's, or a ``typer.Typer`` of verbs.

    ``description`` is the first line of its help, which `embodrl --help` shows without importing the target.

    Attributes:
        sections: top-level section of the configuration that it reads -> its class, derived from ``Section``, or
            ``module:Class``.
        rules: checks that run for this verb, and where a configuration with a section of it is checked for none; or
            ``module:RULES``, imported when they run.
        resumes: name of a file -> ``module:function``, with which `embodrl resume` continues a directory that has the
            file: ``function(directory, settings, trust)`` returns the exit code.
        reads_as: verb whose settings it reads as well, e.g. ``train``; "" for those alone that all verbs read.
    """

    sections: Mapping[str, type[Section] | str] = field(default_factory=dict[str, "type[Section] | str"])
    rules: tuple[RuleSet | str, ...] = ()
    resumes: Mapping[str, str] = field(default_factory=dict[str, str])
    reads_as: str = ""


@dataclass(frozen=True, kw_only=True)
class EnvServerSpec(Entry):
    """Servers that run simulators for runs on other machines, by the scheme of their addresses in ``env.remote``.

    ``target`` is a function of an address that raises ``EnvError`` if no server answers there.

    Attributes:
        relay: module that runs here in place of a simulator, as ``embodrl.envs.pool.worker_main`` does; its START
            frame has the fields of a ``RemoteEnv`` as ``remote``.
    """

    relay: str


class FunctionRegistry(Registry[FunctionSpec]):
    """A registry whose names may also be ``module:function``: what validation needs follows from the signature.

    Args:
        kind: of the functions.
        table: the built-in ones, as that of ``Registry``.
        arguments: where the ``FunctionArguments`` are, as ``module:attribute``.
        group: entry points that name further specs; "" for none.
    """

    def __init__(self, kind: str, table: Mapping[str, str] | str, arguments: str, group: str = "") -> None:
        super().__init__(kind, FunctionSpec, group, table)
        self.arguments = arguments

    def entry(self, name: str) -> FunctionSpec:
        """Return the spec of a registered name, or one made from the signature of the function named.

        Raises:
            EmbodrlError: there is no such name or function, or it has an unknown parameter without default.
        """
        if name in self.names() or ":" not in name:
            return super().entry(name)
        return self._of(name, import_function(name), "", None)

    def register_function(
        self,
        name: str,
        function: Callable[..., object],
        description: str = "",
        settings: type[Section] | None = None,
    ) -> None:
        """Add a function under a name of its own, from a module that ``extensions`` names, or from a script.

        Args:
            name: for the configuration, e.g. ``algorithm.adv_type``.
            function: called with the arguments that its parameters name.
            description: one line for ``embodrl list``; by default the first line of its docstring.
            settings: the class of the section ``algorithm.NAME``, derived from ``Section``: its fields are further
                arguments.

        Raises:
            EmbodrlError: the name is taken, or a parameter without default is unknown.
        """
        self.register(self._of(name, function, description, settings))

    def _of(
        self, name: str, function: Callable[..., object], description: str, settings: type[Section] | None
    ) -> FunctionSpec:
        known: FunctionArguments = import_object(self.arguments)
        names, needed, takes_rest = parameters_of(function)
        arguments = (*known.names, *(() if settings is None else settings.model_fields))
        unknown = sorted(needed - set(arguments))
        if unknown:
            near = nearest(unknown[0], list(arguments))
            raise EmbodrlError(
                f"{self.kind} '{name}' has an unknown parameter '{unknown[0]}'",
                (f"did you mean '{near}'? " if near else "")
                + f"Available: {', '.join(arguments)}; any other parameter needs a default",
                code="function-parameter-unknown",
            )
        return FunctionSpec(
            name=name,
            target=function,
            description=description or (function.__doc__ or "").partition("\n")[0],
            needs_values=not names.isdisjoint(known.values),
            needs_groups=not names.isdisjoint(known.groups),
            parameters=arguments if takes_rest else tuple(sorted(names)),
            settings=settings,
        )

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        try:
            return isinstance(name, str) and ":" in name and bool(self.entry(name))
        except EmbodrlError:
            return False


ENVS = Registry(
    "environment",
    SimulatorSpec,
    "embodrl.envs",
    "embodrl.envs.registry:SIMULATORS",
)
BUILT_IN_STATISTICS = ("maniskill", "new_embodiment")
"""Names of those that models without weights have."""
MODELS = Registry(
    "model",
    ModelSpec,
    "embodrl.models",
    "embodrl.models.registry:FAMILIES",
)


ADVANTAGES = FunctionRegistry(
    "advantage estimator",
    "embodrl.algorithms.registry:ESTIMATORS",
    "embodrl.algorithms.spec:ESTIMATOR_ARGUMENTS",
    "embodrl.estimators",
)
LOSSES = FunctionRegistry(
    "loss",
    "embodrl.algorithms.registry:LOSSES",
    "embodrl.algorithms.spec:LOSS_ARGUMENTS",
    "embodrl.losses",
)
PIPELINES = Registry("pipeline", PipelineSpec, "embodrl.pipelines", "embodrl.pipelines.registry:PIPELINES")
PROTOCOLS = Registry("protocol", ProtocolSpec, "embodrl.eval_protocols", "embodrl.envs.registry:EVAL_PROTOCOLS")
"""Settings of published evaluations."""
ENGINES = Registry("engine", EngineSpec, "embodrl.engines", "embodrl.hybrid_engines.registry:ENGINES")
"""Backends of training and of rollouts."""
SERVE_PROTOCOLS = Registry(
    "protocol of a policy server", ServeProtocolSpec, "embodrl.protocols", "embodrl.serving.registry:PROTOCOLS"
)
VERBS = Registry("verb", VerbSpec, "embodrl.verbs", "embodrl.cli.registry:VERBS")
"""Verbs of the command line that are not the core's; GROUP.NAME is one below a group, e.g. ``env.serve``."""
WORKFLOW_RUNNERS = Registry(
    "runner of workflows", WorkflowRunnerSpec, "embodrl.workflow_runners", "embodrl.workers.registry:WORKFLOW_RUNNERS"
)
"""What plays the episodes of ``rollout.workflow``; the first one does."""
SMALL_ACTORS = Registry("small actor", SmallActorSpec, "embodrl.small_actors", "embodrl.models.registry:ACTORS")
"""What ``model.small_actor.kind`` chooses."""
LAUNCHERS = Registry("launcher", LauncherSpec, "embodrl.launchers", "embodrl.scheduler.launchers.spec:LAUNCHERS")
"""What ``cluster.launcher`` chooses."""
ENV_SERVERS = Registry("kind of env server", EnvServerSpec, "embodrl.env_servers", "embodrl.envs.registry:SERVERS")


class RegisteredName(str):
    """A string that is known to be a name of ``registry``; an enumeration that extensions can add members to.

    Raises:
        UnknownNameError: the name is not registered; lists the known ones and the nearest.
    """

    __slots__ = ()
    registry: ClassVar[Registry[Any]]

    def __new__(cls, name: str) -> Self:
        if name not in cls.registry:
            cls.registry.entry(name)  # raises, and names the nearest
        return super().__new__(cls, name)

    @classmethod
    def members(cls) -> list[Self]:
        """Return the registered names, in order of registration."""
        return [cls(name) for name in cls.registry]

    @classmethod
    def of(cls, spec: Spec) -> Self:
        """Add a spec and return its name, as a member from now on.

        Raises:
            EmbodrlError: the name is taken.
        """
        member = cls(cls.registry.register(spec).name)
        setattr(cls, spec.name.upper(), member)
        return member


def families_of(raw: Mapping[str, object]) -> tuple[str, ...]:
    """Return the families that a config.json may be of; empty if it is of none that is known.

    Public files leave open whether an OpenVLA is an OpenVLA-OFT, and openpi's which of its models it is. Families that
    embodrl has no network of count where no other does.
    """
    found = [MODELS.entry(name) for name in MODELS if is_of_family(raw, name)]
    return tuple(spec.name for spec in found if not spec.only_acts) or tuple(spec.name for spec in found)


def is_of_family(raw: Mapping[str, object], family: str) -> bool:
    """Tell whether a config.json may be of a family."""
    recognizes = MODELS.entry(family).recognizes
    return recognizes is not None and recognizes(raw)
