"""What embodrl knows about simulators and model families: one spec each, found by name without importing torch.

Built-in specs stand in ``embodrl/envs/<simulator>/spec.py`` and ``embodrl/models/<family>/spec.py``. Others come from a
module named in ``extensions``, or from an installed package with an entry point in the group ``embodrl.envs`` or
``embodrl.models``; an entry point is imported when its name is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from embodrl.errors import EmbodrlError, UnknownNameError
from embodrl.names import import_object, nearest

if TYPE_CHECKING:
    from typing import Self  # simulators may live in a Python 3.10, which lacks it

    from embodrl.config.rules.base import RuleSet
    from embodrl.config.schema import EnvConfig, ModelConfig

DEFAULT_ENV, DEFAULT_MODEL = "maniskill", "openvla"

READABLE = ("cameras", "image_size", "reward_mode", "success_bonus", "render_detail", "action_dim", "video")
"""Common settings that only some VectorEnv classes take as constructor arguments."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What both kinds of spec have.

    Attributes:
        name: as in ``env.env_type`` or ``model.model_type``.
        target: ``module:attribute``, imported on first use, or the object itself.
        description: one line for ``embodrl list``.
        actions: what an action means, for ``embodrl list``.
        rules: checks of the configuration that run when this spec is chosen.
    """

    name: str
    target: Any
    description: str = ""
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
            value = getattr(self, name)
            if name in self.NAMES and isinstance(value, list):
                value = tuple(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
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
        is_names = value is None or (isinstance(value, tuple) and all(isinstance(item, str) for item in value))  # pyright: ignore[reportUnknownVariableType]
        return "" if is_names else "a list of names"

    @classmethod
    def make(cls, name: str, target: Any, description: str, facts: Mapping[str, Any]) -> Self:
        """Return a spec from facts given by name.

        Raises:
            EmbodrlError: a fact is unknown, with the nearest known name, or its value is invalid.
        """
        known = [each.name for each in fields(cls) if each.name not in ("name", "target", "description")]
        for fact in facts:
            if fact not in known:
                near = nearest(fact, known)
                raise EmbodrlError(
                    f"'{name}' is registered with an unknown fact '{fact}'",
                    f"did you mean '{near}'?" if near else f"known facts: {', '.join(known)}",
                    code="spec-fact-unknown",
                )
        return cls(name=name, target=target, description=description, **facts)


@dataclass(frozen=True)
class TaskSuite:
    """Tasks that are evaluated together.

    Attributes:
        max_episode_steps: step limit of published evaluations.
        tasks: name -> instruction, in the suite's order.
    """

    max_episode_steps: int
    tasks: Mapping[str, str]


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
        action_dim: numbers of an action; None if the configuration says it.
        batched_by: setting and value with which one process simulates all environments.
        gpu_settings: settings with the value that needs a GPU.
        reward_modes: values of ``env.reward_mode`` that it has; None: all.
        cameras: names of cameras with a pose; None: any name.
        posed_cameras: cameras of other names can be placed with eye and target.
        camera_poses: the pose and field of view of cameras can be set.
        max_cameras: None for no limit.
        needs: Python modules.
        extra: of embodrl, which installs them.
        isolated: ``embodrl env install NAME`` installs it into a Python environment of its own.
        draws_with: vulkan, mujoco, or "" if nothing is checked.
        example: keyword arguments of ``target`` (without ``num_envs``) for the environment that `embodrl doctor` makes.
        process_bytes: memory of a simulator process without environments.
        env_bytes: memory of an environment.
        expert_tasks: tasks with a scripted expert; None: all tasks.
        demonstrations: where demonstrations come from if there is no expert.
        camera_list, experts, verified: for ``embodrl list``.
    """

    settings: type[EnvConfig] | str | None = None
    reads: tuple[str, ...] = ("cameras",)
    tasks: tuple[str, ...] | list[str] | Mapping[str, str] | str = ()
    suites: Mapping[str, TaskSuite] = field(default_factory=dict[str, TaskSuite])
    derive: Callable[[Mapping[str, object]], tuple[dict[str, object], str]] | None = None
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
    draws_with: str = ""
    example: Mapping[str, object] | None = None
    process_bytes: int = 0
    env_bytes: int = 0
    expert_tasks: tuple[str, ...] | None = None
    demonstrations: str = ""
    camera_list: str = ""
    experts: str = ""
    verified: str = ""

    COUNTS = ("action_dim", "max_cameras")
    FLAGS = ("posed_cameras", "camera_poses", "isolated")
    NAMES = ("reads", "reward_modes", "cameras", "needs", "expert_tasks")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.reads:
            if name not in READABLE:
                near = nearest(name, list(READABLE))
                own = "declare a setting of your own in a class derived from EnvConfig, and register settings=ThatClass"
                raise EmbodrlError(
                    f"'{name}' is no common setting that '{self.name}' could read; there are {', '.join(READABLE)}",
                    f"did you mean '{near}'? Or {own}" if near else own,
                    code="spec-fact-invalid",
                )

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
        kind: ``tokens`` (action bins), ``flow`` (flow matching) or "" (any other).
        value_head: it has one, which actor-critic losses need.
        value_inputs: values of ``model.value_head.input`` that it has; None: not checked.
        trainable: values of ``model.trainable`` that it has; None: not checked.
        uses_state: it reads the robot's state; the name of a setting where that decides; None: unknown.
        max_cameras: pictures that it takes; None for no limit.
        num_bins: of an action token.
        autoregressive: it decodes one action token after the other, as vLLM does.
        tensor_parallel: the training backend megatron has its layers.
        builtin_warm_start: embodrl ships weights of the tiny size.
        parity: ``module:function`` that compares it with recordings of the reference implementation.
        num_parameters: from the section ``model`` to about how many parameters a model without a checkpoint has.
        sizes, checkpoint, rl: for ``embodrl list``.
    """

    settings: type[ModelConfig] | str | None = None
    kind: str = ""
    value_head: bool = True
    value_inputs: tuple[str, ...] | None = None
    trainable: tuple[str, ...] | None = None
    uses_state: bool | str | None = None
    max_cameras: int | None = None
    num_bins: int | None = None
    autoregressive: bool = False
    tensor_parallel: bool = False
    builtin_warm_start: bool = False
    parity: str = ""
    num_parameters: Callable[[ModelConfig], int] | None = None
    sizes: str = ""
    checkpoint: str = ""
    rl: str = ""

    COUNTS = ("max_cameras", "num_bins")
    FLAGS = ("value_head", "autoregressive", "tensor_parallel", "builtin_warm_start")
    NAMES = ("value_inputs", "trainable")


S = TypeVar("S", bound=Spec)


class SpecRegistry(Generic[S]):
    """Specs by name: built in, registered, or of an entry point of an installed package.

    Args:
        kind: in words, for messages.
        cls: of the specs.
        group: of the entry points. Each names a spec (``module:SPEC``), or a module that registers its name.
        builtin: name -> ``module:SPEC``.
    """

    def __init__(self, kind: str, cls: type[S], group: str, builtin: Mapping[str, str]) -> None:
        self.kind, self.cls, self.group = kind, cls, group
        self.builtin = dict(builtin)
        self._entries: dict[str, S] = {}
        self._points: dict[str, EntryPoint] | None = None

    def register(self, spec: S) -> S:
        """Add a spec.

        Raises:
            EmbodrlError: the name is taken by another target.
        """
        known = self._entries.get(spec.name)
        if spec.name in self.builtin or (known is not None and known.target != spec.target):
            raise EmbodrlError(f"{self.kind} '{spec.name}' is registered already", "choose another name")
        self._entries[spec.name] = spec
        return spec

    def add(self, name: str, target: Any, description: str = "", **facts: Any) -> S:
        """Make a spec from facts given by name, and add it.

        Raises:
            EmbodrlError: the name is taken, or a fact is unknown or invalid.
        """
        return self.register(self.cls.make(name, target, description, facts))

    def names(self) -> list[str]:
        """Return all names: built in, registered, then those of entry points."""
        return list(dict.fromkeys((*self.builtin, *self._entries, *self._discovered())))

    def entry(self, name: str) -> S:
        """Return the spec of that name; its target is not imported.

        Raises:
            UnknownNameError: no such name; lists the known ones and the nearest.
            EmbodrlError: the entry point of that name can't be imported, or gives no spec.
        """
        if name in self.builtin and name not in self._entries:
            self._entries[name] = import_object(self.builtin[name])
        elif name not in self._entries and name in self._discovered():
            self._entries[name] = self._load(self._discovered()[name])
        if name not in self._entries:
            near = nearest(name, self.names())
            raise UnknownNameError(
                f"unknown {self.kind} '{name}'; known: {', '.join(self.names())}",
                f"did you mean '{near}'?" if near else f"choose a known {self.kind} or register yours",
            )
        return self._entries[name]

    def get(self, name: str) -> Any:
        """Return the target of that name, importing it if need be.

        Raises:
            EmbodrlError: there is no such name, or its module can't be imported.
        """
        target = self.entry(name).target
        if not isinstance(target, str):
            return target
        try:
            return import_object(target)
        except ModuleNotFoundError as error:
            module = target.partition(":")[0]
            if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
                raise  # a module that the target's own module imports
            raise EmbodrlError(
                f"{self.kind} '{name}' is registered as '{target}', and there is no module '{error.name}'",
                "correct the name, or put the directory of the module on PYTHONPATH",
                code="spec-target-missing",
            ) from error

    def all(self) -> list[S]:
        """Return every spec; one of an entry point that can't be imported is left out."""
        found: list[S] = []
        for name in self.names():
            try:
                found.append(self.entry(name))
            except EmbodrlError:
                continue
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self._entries or name in self._discovered()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _discovered(self) -> dict[str, EntryPoint]:
        if self._points is None:  # reading the metadata of all installed packages takes some milliseconds
            self._points = {point.name: point for point in entry_points(group=self.group)}
        return self._points

    def _load(self, point: EntryPoint) -> S:
        try:
            found = point.load()
        except Exception as error:  # a package of somebody else may raise anything when it is imported
            raise EmbodrlError(
                f"{self.kind} '{point.name}' of the entry point '{point.value}' can't be imported:"
                f" {type(error).__name__}: {error}",
                "fix or uninstall the package that declares it",
                code="entry-point-broken",
            ) from error
        spec = found if isinstance(found, self.cls) else self._entries.get(point.name)
        if spec is None:
            raise EmbodrlError(
                f"the entry point '{point.value}' gives no {self.kind} '{point.name}'",
                f"name a {self.cls.__name__}, or a module that registers '{point.name}'",
                code="entry-point-broken",
            )
        return spec


ENVS = SpecRegistry(
    "environment",
    SimulatorSpec,
    "embodrl.envs",
    {name: f"embodrl.envs.{name}.spec:SPEC" for name in ("maniskill", "metaworld", "gymnasium", "libero", "toy")},
)
MODELS = SpecRegistry(
    "model",
    ModelSpec,
    "embodrl.models",
    {
        "openvla": "embodrl.models.openvla.spec:SPEC",
        "openvla_oft": "embodrl.models.openvla_oft.spec:SPEC",
        "pi0": "embodrl.models.pi.spec:PI0",
        "pi05": "embodrl.models.pi.spec:PI05",
        "gr00t": "embodrl.models.gr00t.spec:SPEC",
    },
)


class RegisteredName(str):
    """A string that is known to be a name of ``registry``; an enumeration that extensions can add members to.

    Raises:
        UnknownNameError: the name is not registered; lists the known ones and the nearest.
    """

    __slots__ = ()
    registry: ClassVar[SpecRegistry[Any]]

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
