"""Specs of simulators, model families, algorithms and pipelines, without torch.

Built-in specs are defined next to their implementation, e.g. ``embodrl/envs/<simulator>/spec.py``, and listed in one
table per kind, e.g. ``embodrl/envs/registry.py``. Others come from a module in ``extensions``, or from an installed
package with an entry point in the kind's group, e.g. ``embodrl.envs``. Each is imported when its name is first
requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

from embodrl.errors import EmbodrlError
from embodrl.names import import_function, import_object, nearest, parameters_of
from embodrl.registry import Entry, Registry

if TYPE_CHECKING:
    from typing import Self  # simulators may run in Python 3.10, which lacks it

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
"""Common settings that only some VectorEnv classes accept as constructor arguments."""


@dataclass(frozen=True, kw_only=True)
class Spec(Entry):
    """Common base of simulator and model family specs.

    Attributes:
        actions: meaning of an action, for ``embodrl list``.
        rules: configuration rules that run when this spec is chosen.
    """

    actions: str = ""
    rules: tuple[RuleSet, ...] = ()

    COUNTS: ClassVar[tuple[str, ...]] = ()
    """Attributes that are integers above 0, or None."""
    FLAGS: ClassVar[tuple[str, ...]] = ()
    """Attributes that are booleans."""
    NAMES: ClassVar[tuple[str, ...]] = ()
    """Attributes that are tuples of text, or None."""

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
        """Return what an attribute should be, or "" if it is valid."""
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
"""Camera for the ``example`` of a ``SimulatorSpec``."""


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
    """A perturbation of a simulator's episodes in `embodrl eval axes=...`.

    Attributes:
        group: vision, semantics or execution.
        description: what is changed, and how much.
        tasks: tasks that support it; None: all.
    """

    group: str
    description: str
    tasks: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SimulatorSpec(Spec):
    """A simulator, or any other source of environments.

    Attributes:
        settings: class of section ``env``, derived from ``EnvConfig``, or ``module:Class``; None adds nothing. The
            added settings are passed to ``target`` as keyword arguments.
        reads: common settings from ``READABLE`` that ``target`` also accepts as keyword arguments.
        tasks: names, or name -> instruction, or the location of that mapping as ``module:attribute``; empty: any name.
        suites: name -> tasks that belong together.
        derive: maps the given settings of section ``env`` to unset settings that follow from them, and the name of the
            setting that they follow from.
        simulates: whether policies can act in it; False for mere data, on which only `embodrl sft` runs.
        fill: maps all given settings to the key that further ones follow from, and those (dotted key -> value), which
            are set where the user has not set them.
        robots: names of its robots in datasets; None: not checked.
        control_hz: actions per second; None: unknown before it is started.
        action_dim: action dimension; None if set by the configuration.
        batched_by: setting and value with which one process simulates all environments.
        gpu_settings: settings with the value that needs a GPU.
        reward_modes: supported values of ``env.reward_mode``; None: all but ``potential``.
        cameras: names of cameras with a pose; None: any name.
        posed_cameras: whether cameras with other names can be placed with eye and target.
        camera_poses: whether the pose and field of view of cameras can be set.
        max_cameras: maximum number of cameras; None for no limit.
        needs: required Python modules.
        extra: embodrl extra that installs them.
        isolated: whether ``embodrl env install NAME`` installs it into its own Python environment.
        imports: modules whose import there proves that the packages are compatible.
        draws_with: vulkan, mujoco, or "" if nothing is checked.
        probe: ``probe(settings, python)``, from section ``env`` (None: `embodrl doctor` without a configuration) and
            the simulators' interpreter (None: the current one) to pairs of a missing requirement and how to get it; or
            ``module:function``. Must be quick, since it runs before anything is started.
        warnings: ``module:function`` from the simulators' interpreter (None: the current one) to triples of a name, a
            problem that does not prevent a run, and a hint.
        example: keyword arguments of ``target`` (without ``num_envs``) for the environment that `embodrl doctor` makes.
        process_bytes: memory of a simulator process without environments.
        env_bytes: memory of an environment.
        expert_tasks: tasks with a scripted expert; None: all tasks.
        demonstrations: source of demonstrations if there is no expert.
        interface: maps section ``env`` to the meaning of actions and observations; None: not stated.
        axes: name -> perturbation accepted by ``VectorEnv.set_axis``.
        own_settings: hint for an unknown setting that the simulated environment may have under its own name.
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
                own = "declare your own setting in a class derived from EnvConfig, and register settings=ThatClass"
                raise EmbodrlError(
                    f"'{name}' is not a common setting that '{self.name}' could read; available: {', '.join(READABLE)}",
                    f"did you mean '{near}'? Or {own}" if near else own,
                    code="spec-fact-invalid",
                )

    def axes_of(self, tasks: Sequence[str]) -> dict[str, Axis]:
        """Return the axes that all of these tasks support."""
        return {name: axis for name, axis in self.axes.items() if axis.tasks is None or set(tasks) <= set(axis.tasks)}

    def instructions(self) -> dict[str, str]:
        """Return the tasks with their instructions ("" if unknown); empty if any name is valid."""
        found: Any = import_object(self.tasks) if isinstance(self.tasks, str) else self.tasks
        if isinstance(found, Mapping):
            return {str(task): str(text) for task, text in found.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return dict.fromkeys(found, "")


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    """A model family. ``target`` is called as ``build(config, device=..., dtype=..., seed=...)``.

    Attributes:
        settings: class of section ``model``, derived from ``ModelConfig``, or ``module:Class``; None adds nothing.
        kind: ``tokens`` (action bins), ``sequence`` (tokens of a whole chunk), ``flow`` (flow matching), ``gaussian``
            (no language), ``text`` (messages) or "" (any other).
        value_head: whether it has a value head, which actor-critic losses need.
        value_inputs: supported values of ``model.value_head.input``; None: not checked.
        trainable: supported values of ``model.trainable``; None: not checked.
        uses_state: whether it reads the robot's state; the name of a setting that decides this; None: unknown.
        uses_images: whether it reads images; the name of a setting that decides this.
        max_cameras: maximum number of images; None for no limit.
        num_bins: bins per action token.
        autoregressive: whether it decodes action tokens one after the other, like vLLM.
        keeps_vision_features: whether a chunk records frozen vision features in place of images.
        off_policy: whether it derives from ``OffPolicyActor``, with reparameterised actions as sac and rlpd need.
        recognizes: whether the content of a config.json belongs to this family; None: never.
        public_layout: whether it derives from ``PublicLayout``: `embodrl model random` writes checkpoints in its
            layout.
        public_preset: preset of ``model`` with the dimensions of the published weights.
        tensor_parallel: whether the training backend megatron has its layers.
        builtin_warm_start: whether embodrl ships weights of the tiny size.
        parity: ``module:function`` that compares it with recordings of the reference implementation, for `embodrl
            parity`, which knows the built-in families itself. It takes the fixture's directory and, with ``--device
            cuda``, ``device``.
        num_parameters: maps section ``model`` to the approximate parameter count of a model without a checkpoint.
        experts: maps section ``model`` to the number of experts of a layer: 0 for none, None if its checkpoint is not
            here. None: the family has no experts.
        missing_config: hint for a directory with weights but no config.json, if public tools write such directories.
        interface: maps a configuration with a checkpoint not written by embodrl to its known conventions; None: none.
        only_acts: location of its network, if that is remote: it has no gradients, and can only be evaluated.
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
    experts: Callable[[Any], int | None] | None = None
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
    """An advantage estimator or a loss, with the facts that validation needs.

    Attributes:
        needs_values: whether it uses a critic's values.
        needs_groups: whether it compares the episodes of a group.
        off_policy: whether it learns from a replay buffer with its own critics; for an estimator: there are no
            advantages.
        offline: whether it learns from a dataset, without rollouts.
        imitates: whether it learns from an expert's labels in the buffer, without critics.
        sums_rewards: whether only the discounted sum of an episode's rewards counts, not how they are spread.
        takes_interventions: whether it learns from what an expert or a person does in place of the policy.
        ignores: settings of section ``algorithm`` that it does not read.
        parameters: parameters in a custom function's signature, which it is passed; None if it takes all there are.
        family_kind: kind of the supported model families; "" for all.
        parts: ``module:function`` that builds the components of a run with this loss, like
            ``embodrl.trainer.parts.build``; None for losses that learn from rollouts.
        rules: configuration rules that run when it is chosen.
        settings: class of section ``algorithm.NAME``, derived from ``Section``, or ``module:Class``, whose fields are
            arguments; None: there is none.
        section: name of that section if several functions share it; "" for the function's own.
    """

    needs_values: bool = False
    needs_groups: bool = False
    off_policy: bool = False
    offline: bool = False
    imitates: bool = False
    sums_rewards: bool = False
    takes_interventions: bool = False
    ignores: tuple[str, ...] = ()
    parameters: tuple[str, ...] | None = None
    family_kind: str = ""
    parts: str | None = None
    rules: tuple[RuleSet, ...] = ()
    settings: type[Section] | str | None = None
    section: str = ""

    @property
    def learns_from_records(self) -> bool:
        """Whether it learns without a rollout's advantages."""
        return self.off_policy or self.offline


@dataclass(frozen=True)
class FunctionArguments:
    """Arguments of the functions of one kind, by name.

    Attributes:
        names: all arguments.
        values: arguments that need a critic.
        groups: arguments that need groups of episodes.
    """

    names: tuple[str, ...]
    values: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PipelineSpec(Entry):
    """A pipeline. ``target`` is called with the configuration and returns a ``Pipeline``."""


@dataclass(frozen=True, kw_only=True)
class ProtocolSpec(Entry):
    """A published evaluation protocol: settings that ``protocol=NAME`` uses in place of the presets'.

    Attributes:
        env_type: environment of the protocol.
        source: publication of the protocol.
        settings: dotted key -> value, for all models.
        models: model family -> further settings.
        step_limits: model family, or "" for the others -> suite -> ``env.max_episode_steps``.
        episodes_per_task: episodes per task and evaluation.
        camera_px: height and width of all cameras, in pixels.
        differs: known deviations of embodrl from the protocol; "" for none.
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
            to a ``PolicyTrainEngine``, called in each of them (``native`` also trains in the driver, and without a
            mesh); None if it does not train.
        rollout: ``module:function`` from ``RolloutParts`` to a ``RolloutEngine``; None if it does not act.
        training_settings: class of section ``actor.NAME``, derived from ``Section``, or ``module:Class``.
        rollout_settings: class of section ``rollout.NAME``; likewise.
        rules: configuration rules that run when it is chosen.
        shards: whether its training processes hold weight shards, with which no rollout can act.
        trains_adapters: whether it trains ``model.trainable: lora``.
        every_update: whether it runs every update; False: only updates from rollouts, and not `embodrl sft`.
        keeps_masters: whether it respects ``actor.optim.master_weights``.
        frees_gradients: whether ``actor.enable_offload`` drops gradients instead of moving them.
        training_memory: ``module:function`` from configuration, deployment, ``ModelFigures`` and the bytes of the
            reference to the bytes of one training process by component; "" for shares like fsdp's.
        own_weights: whether inference uses a copy of the weights, even in the training process.
        decodes_all: whether its inference supports every decoding of the model family.
        in_processes: whether rollout processes may each have one; False: only the main process.
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
    in_processes: bool = True


@dataclass(frozen=True, kw_only=True)
class ServeProtocolSpec(Entry):
    """A protocol of `embodrl serve`. ``target`` is a class derived from ``Listener``.

    Attributes:
        settings: class of section ``serve.NAME``, derived from ``WireKeysConfig``, or ``module:Class``.
        rules: configuration rules that run when it is served.
        has_tls: whether its clients support TLS.
        client: class derived from ``Client`` with which model=remote queries such a server, or ``module:Class``; None:
            there is none.
        schemes: URL schemes, e.g. ``ws``.
        serves_text: it carries messages of policies that write text (``ModelSpec.kind`` ``text``), not actions.
    """

    settings: type[Section] | str | None = None
    rules: tuple[RuleSet, ...] = ()
    has_tls: bool = True
    client: Callable[..., object] | str | None = None
    schemes: tuple[str, ...] = ()
    serves_text: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkflowRunnerSpec(Entry):
    """Runner of workflow episodes. ``target`` is a class with the arguments of ``LockstepRunner``.

    Attributes:
        collector: class derived from ``SyncCollector``, for synchronous runs, as ``module:Class``.
        evaluator: class derived from ``Evaluator``, as ``module:Class``.
    """

    collector: str = ""
    evaluator: str = ""


@dataclass(frozen=True, kw_only=True)
class SmallActorSpec(Entry):
    """A small actor that learns on a frozen policy.

    ``target`` is a class with the class methods ``base_config`` and ``build`` of
    ``embodrl.models.small_actors.on_frozen.OnFrozenPolicy``.

    Attributes:
        update: class derived from ``OffPolicyUpdate`` that trains it, as ``module:Class``; None: ``OffPolicyUpdate``.
        settings: class of section ``model.NAME``, derived from ``Section``, or ``module:Class``.
        rules: configuration rules that run when it is chosen.
    """

    update: str | None = None
    settings: type[Section] | str | None = None
    rules: tuple[RuleSet, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LauncherSpec(Entry):
    """Launcher of actor and rollout processes. ``target`` is a class derived from ``Launcher``.

    Attributes:
        settings: class of section ``cluster.NAME``, derived from ``Section``, or ``module:Class``.
        rules: configuration rules that run when it is chosen.
        starts_everything: whether it also starts processes for work that the main process could do.
        many_machines: whether it starts processes on other machines, too.
        for_runs: whether ``cluster.launcher`` may name it; False: only for worker groups in a user's own program.
    """

    settings: type[Section] | str | None = None
    rules: tuple[RuleSet, ...] = ()
    starts_everything: bool = False
    many_machines: bool = False
    for_runs: bool = True


@dataclass(frozen=True, kw_only=True)
class VerbSpec(Entry):
    """A verb of the command line. ``target`` is a function with typer parameters, or a ``typer.Typer`` of verbs.

    ``description`` is the first line of its help, which `embodrl --help` shows without importing the target.

    Attributes:
        sections: top-level section of the configuration that it reads -> its class, derived from ``Section``, or
            ``module:Class``.
        rules: rules that run for this verb, and for configurations with one of its sections that are checked without a
            verb; or ``module:RULES``, imported when they run.
        resumes: file name -> ``module:function``, with which `embodrl resume` continues a directory that contains the
            file: ``function(directory, settings, trust)`` returns the exit code.
        reads_as: verb whose settings it reads as well, e.g. ``train``; "" for only the settings that all verbs read.
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
        relay: module that runs here in place of a simulator, like ``embodrl.envs.pool.worker_main``; its START frame
            has the fields of a ``RemoteEnv`` as ``remote``.
    """

    relay: str


class FunctionRegistry(Registry[FunctionSpec]):
    """A registry that also accepts ``module:function`` as a name; the facts for validation follow from the signature.

    Args:
        kind: kind of the functions.
        table: built-in functions, as for ``Registry``.
        arguments: location of the ``FunctionArguments``, as ``module:attribute``.
        group: entry points that name further specs; "" for none.
    """

    def __init__(self, kind: str, table: Mapping[str, str] | str, arguments: str, group: str = "") -> None:
        super().__init__(kind, FunctionSpec, group, table)
        self.arguments = arguments

    def entry(self, name: str) -> FunctionSpec:
        """Return the spec of a registered name, or one derived from the signature of the named function.

        Raises:
            EmbodrlError: there is no such name or function, or it has an unknown parameter without default.
        """
        if name in self.names() or ":" not in name:
            return super().entry(name)
        return self.of(name, import_function(name))

    def register_function(
        self,
        name: str,
        function: Callable[..., object],
        description: str = "",
        settings: type[Section] | None = None,
    ) -> None:
        """Register a function under a name, from a module in ``extensions`` or from a script.

        Args:
            name: name in the configuration, e.g. for ``algorithm.adv_type``.
            function: called with the arguments that its parameters name.
            description: one line for ``embodrl list``; defaults to the first line of its docstring.
            settings: class of section ``algorithm.NAME``, derived from ``Section``; its fields are further arguments.

        Raises:
            EmbodrlError: the name is taken, or a parameter without default is unknown.
        """
        self.register(self.of(name, function, description, settings))

    def of(
        self,
        name: str,
        function: Callable[..., object],
        description: str = "",
        settings: type[Section] | None = None,
    ) -> FunctionSpec:
        """Return the spec that follows from a function's signature; arguments and errors as ``register_function``."""
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
"""Loss names for models without weights."""
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
"""Published evaluation protocols."""
ENGINES = Registry("engine", EngineSpec, "embodrl.engines", "embodrl.hybrid_engines.registry:ENGINES")
"""Training and rollout backends."""
SERVE_PROTOCOLS = Registry(
    "protocol of a policy server", ServeProtocolSpec, "embodrl.protocols", "embodrl.serving.registry:PROTOCOLS"
)
VERBS = Registry("verb", VerbSpec, "embodrl.verbs", "embodrl.cli.registry:VERBS")
"""Command-line verbs outside the core; GROUP.NAME belongs to a group, e.g. ``env.serve``."""
WORKFLOW_RUNNERS = Registry(
    "runner of workflows", WorkflowRunnerSpec, "embodrl.workflow_runners", "embodrl.workers.registry:WORKFLOW_RUNNERS"
)
"""Runners of the episodes of ``rollout.workflow``; the first one is used."""
SMALL_ACTORS = Registry("small actor", SmallActorSpec, "embodrl.small_actors", "embodrl.models.registry:ACTORS")
"""Values of ``model.small_actor.kind``."""
LAUNCHERS = Registry("launcher", LauncherSpec, "embodrl.launchers", "embodrl.scheduler.launchers.spec:LAUNCHERS")
"""Values of ``cluster.launcher``."""
ENV_SERVERS = Registry("kind of env server", EnvServerSpec, "embodrl.env_servers", "embodrl.envs.registry:SERVERS")


class RegisteredName(str):
    """A string that is a registered name of ``registry``, like an enumeration that extensions can extend.

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
        return [cls(name) for name in cls.registry]

    @classmethod
    def of(cls, spec: Spec) -> Self:
        """Add a spec and return its name as a new member.

        Raises:
            EmbodrlError: the name is taken.
        """
        member = cls(cls.registry.register(spec).name)
        setattr(cls, spec.name.upper(), member)
        return member


def families_of(raw: Mapping[str, object]) -> tuple[str, ...]:
    """Return the families that a config.json may belong to; empty if no known one matches.

    Public files do not distinguish OpenVLA from OpenVLA-OFT, nor openpi's models from each other. Families without a
    network in embodrl count only if no other matches.
    """
    found = [MODELS.entry(name) for name in MODELS if is_of_family(raw, name)]
    return tuple(spec.name for spec in found if not spec.only_acts) or tuple(spec.name for spec in found)


def is_of_family(raw: Mapping[str, object], family: str) -> bool:
    """Return whether a config.json may belong to a family."""
    recognizes = MODELS.entry(family).recognizes
    return recognizes is not None and recognizes(raw)
