"""Names to objects, resolved lazily: asking whether a name exists imports neither torch nor a simulator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from embodrl.errors import EmbodrlError, UnknownNameError
from embodrl.names import import_function, import_object, nearest, parameters_of

if TYPE_CHECKING:
    from typing import Self  # simulators may live in a Python 3.10, which lacks it


@dataclass(frozen=True)
class Entry:
    """A registered name.

    Attributes:
        target: ``module:attribute``, imported on first use, or the object itself.
        description: one line for ``embodrl list``.
        facts: what validation needs to know without importing the target.
    """

    target: Any
    description: str = ""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


class Registry:
    """A table of names of one kind, with close-match hints."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, target: Any, description: str = "", **facts: Any) -> None:
        """Add a name.

        Raises:
            EmbodrlError: the name is taken by another target.
        """
        known = self._entries.get(name)
        if known is not None and known.target != target:
            raise EmbodrlError(f"{self.kind} '{name}' is registered already", "choose another name")
        self._entries[name] = Entry(target, description, facts)

    def names(self) -> list[str]:
        """Return the registered names, in order of registration."""
        return list(self._entries)

    def entry(self, name: str) -> Entry:
        """Return the entry of that name without importing its target.

        Raises:
            UnknownNameError: no such name; lists the known ones and the nearest.
        """
        if name not in self._entries:
            near = nearest(name, self.names())
            raise UnknownNameError(
                f"unknown {self.kind} '{name}'; known: {', '.join(self.names())}",
                f"did you mean '{near}'?" if near else f"choose a known {self.kind} or register yours",
            )
        return self._entries[name]

    def get(self, name: str) -> Any:
        """Return the object of that name, importing it if need be."""
        target = self.entry(name).target
        return import_object(target) if isinstance(target, str) else target

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


class RegisteredName(str):
    """A string that is known to be a name of ``registry``; an enumeration that extensions can add members to.

    Raises:
        UnknownNameError: the name is not registered; lists the known ones and the nearest.
    """

    __slots__ = ()
    registry: ClassVar[Registry]

    def __new__(cls, name: str) -> Self:
        cls.registry.entry(name)
        return super().__new__(cls, name)

    @classmethod
    def members(cls) -> list[Self]:
        """Return the registered names, in order of registration."""
        return [cls(name) for name in cls.registry]

    @classmethod
    def add(cls, name: str, target: Any, description: str, **facts: Any) -> Self:
        """Register a name and return it, as a member from now on. See ``Registry.register``."""
        cls.registry.register(name, target, description, **facts)
        member = cls(name)
        setattr(cls, name.upper(), member)
        return member


class FunctionRegistry(Registry):
    """A registry whose names may also be ``module:function`` of the user's own.

    A function gets what its parameters name. What validation needs to know about it follows from that, too.

    Args:
        kind: of the functions.
        arguments: what a function can ask for, with the fact that follows where it does ("" for none).
    """

    def __init__(self, kind: str, arguments: dict[str, str]) -> None:
        super().__init__(kind)
        self.arguments = arguments

    def entry(self, name: str) -> Entry:
        """Return the entry of a registered name, or one made from the signature of the function named.

        Raises:
            EmbodrlError: there is no such name or function, or it wants what nobody gives it.
        """
        if name in self._entries or ":" not in name:
            return super().entry(name)
        function = import_function(name)
        return Entry(function, (function.__doc__ or "").partition("\n")[0], self._facts(name, function))

    def register_function(self, name: str, function: Callable[..., Any], description: str = "") -> None:
        """Add a function under a name of its own, from a module that ``extensions`` names, or from a script.

        Args:
            name: for the configuration, e.g. ``algorithm.adv_type``.
            function: called with the arguments that its parameters name.
            description: one line for ``embodrl list``; by default the first line of its docstring.

        Raises:
            EmbodrlError: the name is taken, or a parameter without default is unknown.
        """
        text = description or (function.__doc__ or "").partition("\n")[0]
        self.register(name, function, text, **self._facts(name, function))

    def _facts(self, name: str, function: Callable[..., Any]) -> dict[str, Any]:
        """Return what validation needs to know about a function, from its parameters."""
        names, needed, takes_rest = parameters_of(function)
        unknown = sorted(needed - set(self.arguments))
        if unknown:
            near = nearest(unknown[0], list(self.arguments))
            raise EmbodrlError(
                f"{self.kind} '{name}' has an unknown parameter '{unknown[0]}'",
                (f"did you mean '{near}'? " if near else "")
                + f"Available: {', '.join(self.arguments)}; any other parameter needs a default",
                code="function-parameter-unknown",
            )
        facts: dict[str, Any] = {fact: False for fact in self.arguments.values() if fact}
        facts |= {fact: True for argument, fact in self.arguments.items() if fact and argument in names}
        facts["parameters"] = tuple(self.arguments if takes_rest else names)
        return facts

    def __contains__(self, name: object) -> bool:
        if name in self._entries:
            return True
        try:
            return isinstance(name, str) and bool(self.entry(name))
        except EmbodrlError:
            return False


MODELS = Registry("model")
_TOKEN_FACTS: dict[str, Any] = {
    "kind": "tokens",
    "value_head": True,
    "num_bins": 256,
    "value_inputs": ("prompt_end", "prompt_mean"),
    "trainable": ("all", "lora", "head"),
    "rl": "log-probs of action tokens: temperature, top-k",
}
_FLOW_FACTS: dict[str, Any] = {
    "kind": "flow",
    "value_head": True,
    "value_inputs": ("prefix", "suffix"),
    "trainable": ("all", "lora", "action_expert", "head"),
    "uses_state": True,
    "rl": "Gaussian log-probs of denoising steps: flow_sde, flow_noise",
}
MODELS.register(
    "openvla",
    "embodrl.models.openvla.build:build_openvla",
    "OpenVLA: DINOv2 + SigLIP vision, Llama, 256-bin action tokens",
    **_TOKEN_FACTS,
    autoregressive=True,
    uses_state=False,
    max_cameras=1,
    dimensions="architecture",
    builtin_warm_start=True,
    parity="embodrl.models.openvla.parity:run",
    sizes="2.3 M (tiny), 7.54 B",
    actions="256 bins a dimension, decoded one after the other",
    checkpoint="openvla/openvla-7b and fine-tunes of it",
)
MODELS.register(
    "openvla_oft",
    "embodrl.models.openvla_oft.build:build_openvla_oft",
    "OpenVLA-OFT: OpenVLA with several images and bidirectional parallel decoding of a chunk",
    **_TOKEN_FACTS,
    uses_state="model.use_proprio",
    max_cameras=4,
    dimensions="architecture",
    parity="embodrl.models.openvla_oft.parity:run",
    sizes="2.3 M (tiny), 7.54 B",
    actions="256 bins a dimension, the whole chunk at once",
    checkpoint="discrete OpenVLA-OFT fine-tunes in Hugging Face layout",
)
for _name, _title, _tiny, _uses_state, _checkpoint in (
    ("pi0", "pi0", "1.5 M", True, "openpi's PyTorch conversion, or lerobot's pi0 layout"),
    ("pi05", "pi0.5", "1.7 M", "model.pi.discrete_state", "openpi's PyTorch conversion, or lerobot's pi05 layout"),
):
    MODELS.register(
        _name,
        f"embodrl.models.pi.build:build_{_name}",
        f"{_title}: PaliGemma and a flow-matching action expert",
        **{**_FLOW_FACTS, "uses_state": _uses_state},
        max_cameras=3,
        dimensions="pi",
        parity="embodrl.models.pi.parity:run",
        sizes=f"{_tiny} (tiny), about 3.3 B",
        actions="continuous chunk by flow matching",
        checkpoint=_checkpoint,
    )
MODELS.register(
    "gr00t",
    "embodrl.models.gr00t.build:build_gr00t",
    "GR00T N1.5: SigLIP 2, Qwen3 and a flow-matching diffusion transformer",
    **_FLOW_FACTS,
    max_cameras=3,
    dimensions="gr00t",
    parity="embodrl.models.gr00t.parity:run",
    sizes="2.1 M (tiny), about 2.7 B",
    actions="continuous chunk by flow matching, encoders a robot",
    checkpoint="nvidia/GR00T-N1.5-3B and fine-tunes of it",
)

ENVS = Registry("environment")
# Facts of an environment: ``tasks``, names or where the table of their instructions is; ``action_dim``, if fixed;
# ``settings``, the keys of the section env that it reads beside those that all do; ``reward_modes``; ``cameras``, names
# that it knows without a place; ``movable_cameras``, others may be placed; ``max_cameras``; ``needs``, modules;
# ``extra``, which installs them, or ``isolated``, `embodrl env install` does; ``suites``; ``expert_tasks``, those that
# `embodrl collect` can show, if not all, and ``demonstrations``, what to do instead; what is listed.
_REWARDS = ("reward_mode", "success_bonus")
ENVS.register(
    "maniskill",
    "embodrl.envs.maniskill.env:ManiSkillVectorEnv",
    "ManiSkill 3 (SAPIEN) table-top manipulation",
    tasks="embodrl.envs.maniskill.tasks:INSTRUCTIONS",
    action_dim=7,
    settings=("cameras", *_REWARDS, "sim_backend", "render_backend", "render_detail", "mesh_decimation", "video"),
    needs=("mani_skill", "sapien", "fast_simplification"),
    extra="maniskill",
    actions="change of the gripper's pose (x, y, z, three angles) and its opening, -1 to 1",
    camera_list="base_camera, or any name with eye and target",
    experts="PushCube, PullCube, PickCube, StackCube, LiftPegUpright",
    expert_tasks=("PushCube-v1", "PullCube-v1", "PickCube-v1", "StackCube-v1", "LiftPegUpright-v1"),
    verified="all tasks on a CPU; on a GPU not yet",
)
ENVS.register(
    "metaworld",
    "embodrl.envs.metaworld.env:MetaWorldVectorEnv",
    "Meta-World 3 (MuJoCo): a Sawyer arm; MT1, MT10 and MT50",
    tasks="embodrl.envs.metaworld.tasks:INSTRUCTIONS",
    action_dim=4,
    settings=("cameras", *_REWARDS, "render_detail", "video"),
    cameras=("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV"),
    needs=("metaworld", "mujoco", "fast_simplification"),
    extra="metaworld",
    actions="change of the gripper's place (x, y, z) and its closing, -1 to 1",
    camera_list="topview, corner, corner2 to 4, behindGripper, gripperPOV, or any name with eye and target",
    experts="all tasks",
    verified="all tasks on a CPU (MUJOCO_GL=egl); on a GPU not yet",
)
ENVS.register(
    "gymnasium",
    "embodrl.envs.gymnasium.env:GymnasiumVectorEnv",
    "any environment registered with Gymnasium: env.id, env.instruction, model.action_dim",
    settings=(
        "cameras",
        *_REWARDS,
        "id",
        "instruction",
        "success_key",
        "success_threshold",
        "action_dim",
        "render_detail",
        "video",
    ),
    reward_modes=("dense", "sparse"),
    max_cameras=1,
    needs=("gymnasium", "PIL"),
    extra="gymnasium",
    actions="a Box, mapped from -1 to 1; no discrete actions",
    camera_list="one: what render_mode=rgb_array draws, brought to the camera's size",
    expert_tasks=(),
    verified="Reacher-v5, Hopper-v5 and Pendulum-v1 on a CPU",
)
_LIBERO_SUITES: dict[str, Any] = json.loads(
    (Path(__file__).parent / "envs" / "libero" / "suites.json").read_text(encoding="utf-8")
)
ENVS.register(
    "libero",
    "embodrl.envs.libero.env:LiberoVectorEnv",
    "LIBERO (MuJoCo, Panda): the standard suites, their official tasks and initial states",
    tasks={task: facts["instruction"] for suite in _LIBERO_SUITES.values() for task, facts in suite["tasks"].items()},
    suites=_LIBERO_SUITES,
    action_dim=7,
    settings=("cameras", *_REWARDS, "suite", "libero_assets", "settle_steps", "render_detail", "video"),
    reward_modes=("sparse",),
    cameras=("agentview", "wrist", "frontview", "birdview", "sideview"),
    movable_cameras=False,
    isolated=True,
    actions="change of the gripper's pose (x, y, z, three angles), and its closing by sign, -1 to 1",
    camera_list="agentview, wrist, frontview, birdview, sideview",
    experts="none; `embodrl convert libero` reads LIBERO's demonstrations",
    expert_tasks=(),
    demonstrations="`embodrl convert libero` makes a data set of the demonstrations that LIBERO brings",
    verified="on a CPU (MUJOCO_GL=egl); on a GPU not yet",
)
ENVS.register(
    "toy",
    "embodrl.envs.toy.env:ToyVectorEnv",
    "a dot to be moved to a coloured goal; needs no simulator",
    tasks="embodrl.envs.toy.tasks:INSTRUCTIONS",
    action_dim=7,
    settings=("image_size",),
    actions="the first two numbers move the dot, -1 to 1",
    camera_list="one, from above",
    experts="all tasks",
    verified="everywhere",
)


def env_tasks(name: str) -> dict[str, str]:
    """Return the tasks of an environment with what the policy is told ("" if unknown); empty if any name will do."""
    tasks: Any = ENVS.entry(name).facts.get("tasks", ()) if name in ENVS else ()
    found: Any = import_object(tasks) if isinstance(tasks, str) else tasks
    return (
        {str(task): str(text) for task, text in found.items()} if hasattr(found, "items") else dict.fromkeys(found, "")
    )


# What advantage estimators and losses of whatever origin may ask for, by the names of their parameters. Shapes are in
# docs/algorithms.md.
_ESTIMATOR_ARGUMENTS = {
    "rewards": "",
    "values": "needs_values",
    "valid": "",
    "terminated": "",
    "truncated": "",
    "bootstrap_values": "needs_values",
    "success": "",
    "task_id": "",
    "group_id": "needs_groups",
    "gamma": "",
    "gae_lambda": "",
    "reward_type": "",
    "bootstrap_type": "",
}
_LOSS_ARGUMENTS = {
    "logprobs": "",
    "old_logprobs": "",
    "ref_logprobs": "",
    "prox_logprobs": "",
    "behavior_weights": "",
    "advantages": "",
    "valid": "",
    "entropy": "",
    "values": "needs_values",
    "old_values": "needs_values",
    "returns": "needs_values",
    "weights": "",
    "counts": "",
    "logprob_type": "",
    "length_normalized_ratio": "",
    "surrogate": "",
    "clip_ratio_low": "",
    "clip_ratio_high": "",
    "clip_ratio_dual": "",
    "drift_coef": "",
    "value_clip": "",
    "value_loss_coef": "",
    "huber_delta": "",
    "entropy_type": "",
    "entropy_bonus": "",
    "kl_coef": "",
    "kl_estimator": "",
}

ADVANTAGES = FunctionRegistry("advantage estimator", _ESTIMATOR_ARGUMENTS)
ADVANTAGES.register("gae", "embodrl.algorithms.advantages:gae", "generalised advantage estimation", needs_values=True)
ADVANTAGES.register(
    "grpo",
    "embodrl.algorithms.groups:grpo",
    "return of the episode less the mean of its group",
    needs_values=False,
    needs_groups=True,
)
ADVANTAGES.register(
    "rloo",
    "embodrl.algorithms.groups:rloo",
    "return of the episode less the mean of the others of its group",
    needs_values=False,
    needs_groups=True,
)
ADVANTAGES.register(
    "reinforce_pp",
    "embodrl.algorithms.groups:reinforce_pp",
    "discounted rewards to come, without a baseline",
    needs_values=False,
    needs_groups=False,
)

LOSSES = FunctionRegistry("loss", _LOSS_ARGUMENTS)
LOSSES.register(
    "actor_critic", "embodrl.algorithms.losses:actor_critic_loss", "PPO clip with a value loss", needs_values=True
)
LOSSES.register("actor", "embodrl.algorithms.losses:actor_loss", "PPO clip without a critic", needs_values=False)

# Each builds a graph from a Config. ``setting`` is what makes the algorithm what its name says: (key, value), and
# "pipeline=NAME" with another value is refused. Without a name, the first whose setting holds is taken.
PIPELINES = Registry("pipeline")
for _name, _description, _setting in (
    ("srpo", "rewards of failures by their likeness to successes", ("algorithm.srpo.enabled", True)),
    ("dapo", "groups with both successes and failures, from further rollouts", ("algorithm.filter.enabled", True)),
    ("cpgd", "clipped log ratios and policy drift", ("algorithm.surrogate", "log_ratio")),
    ("gspo", "one ratio a chunk", ("algorithm.length_normalized_ratio", True)),
    ("ppo", "a critic and GAE", ("algorithm.adv_type", "gae")),
    ("grpo", "returns compared within groups", ("algorithm.adv_type", "grpo")),
    ("rloo", "returns less the mean of the others of the group", ("algorithm.adv_type", "rloo")),
    ("reinforce_pp", "rewards to come, without a baseline", ("algorithm.adv_type", "reinforce_pp")),
):
    PIPELINES.register(_name, f"embodrl.pipelines.builtin:{_name}", _description, setting=_setting)
