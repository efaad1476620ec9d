"""Names to objects, resolved lazily: asking whether a name exists imports neither torch nor a simulator."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from embodrl.errors import EmbodrlError, UnknownNameError


def nearest(name: str, known: list[str], cutoff: float = 0.5) -> str:
    """Return the known name closest to ``name``, or "" if none is at least as similar as ``cutoff`` (1: the same)."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return matches[0] if matches else ""


def import_object(path: str) -> Any:
    """Return the object that ``module:attribute`` names.

    Raises:
        EmbodrlError: the path is not of that form, or there is no such attribute.
        Exception: whatever importing the module raised.
    """
    module_name, separator, attribute = path.partition(":")
    if not separator or not module_name or not attribute:
        raise EmbodrlError(f"'{path}' is not of the form module:attribute", "write my_package.my_module:my_function")
    module = importlib.import_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        hint = nearest(attribute, [name for name in vars(module) if not name.startswith("_")])
        remedy = f"did you mean {module_name}:{hint}?" if hint else f"define it in {module_name}"
        raise EmbodrlError(f"module '{module_name}' has no attribute '{attribute}'", remedy) from error


def nearest_module(missing: str) -> str:
    """Return the module whose name is closest to one that there is not, or ""; its parents must be there."""
    parent, _, leaf = missing.rpartition(".")
    search = list(getattr(importlib.import_module(parent), "__path__", [])) if parent else None
    hint = nearest(leaf, [found.name for found in pkgutil.iter_modules(search)])
    return f"{parent}.{hint}" if parent and hint else hint


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
            hint = nearest(name, self.names())
            raise UnknownNameError(
                f"unknown {self.kind} '{name}'; known: {', '.join(self.names())}",
                f"did you mean '{hint}'?" if hint else f"choose a known {self.kind} or register yours",
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


def import_function(path: str) -> Callable[..., Any]:
    """Return the function of the user's that ``module:function`` names.

    Raises:
        EmbodrlError: there is none, or its module can't be imported; says why.
    """
    try:
        found = import_object(path)
    except EmbodrlError:
        raise
    except Exception as error:  # a user's module may raise anything
        remedy = "mend the module, or put its directory on PYTHONPATH"
        if isinstance(error, ModuleNotFoundError) and error.name and _is_part(error.name, path.partition(":")[0]):
            hint = nearest_module(error.name)
            remedy = f"did you mean '{hint}'? Or put the directory of the module on PYTHONPATH" if hint else remedy
        raise EmbodrlError(f"importing '{path}' failed: {type(error).__name__}: {error}", remedy) from error
    if not callable(found):
        raise EmbodrlError(f"'{path}' is a {type(found).__name__}, not a function", "name a function")
    return found


def import_workflow(path: str) -> Any:
    """Return an instance of the workflow that ``module:Class`` names.

    Raises:
        EmbodrlError: there is none, or it is none; says why.
    """
    found = import_function(path)
    if not inspect.isclass(found) or not inspect.iscoroutinefunction(getattr(found, "run_episode", None)):
        raise EmbodrlError(
            f"'{path}' is no class with `async def run_episode(self, engine, env, task)`",
            "name a subclass of embodrl.workers.workflow.RolloutWorkflow",
        )
    try:
        return found()
    except Exception as error:  # a user's class may raise anything
        raise EmbodrlError(
            f"making '{path}' failed: {type(error).__name__}: {error}", "give it a constructor without arguments"
        ) from error


def _is_part(name: str, module: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def parameters_of(function: Callable[..., Any]) -> tuple[set[str], set[str], bool]:
    """Return the keyword parameters of a function, those of them without default, and whether it takes any others."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    needed = {p.name for p in named if p.default is p.empty}
    return {p.name for p in named}, needed, any(p.kind is p.VAR_KEYWORD for p in parameters)


def call_named(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with those of the arguments that its parameters name."""
    names, _, takes_all = parameters_of(function)
    return function(**{name: value for name, value in arguments.items() if takes_all or name in names})


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
        names, needed, _ = parameters_of(function)
        unknown = sorted(needed - set(self.arguments))
        if unknown:
            raise EmbodrlError(
                f"{self.kind} '{name}' has a parameter '{unknown[0]}', which nothing is given for",
                f"name any of {', '.join(self.arguments)}, or give it a default",
            )
        facts: dict[str, Any] = {fact: False for fact in self.arguments.values() if fact}
        facts |= {fact: True for argument, fact in self.arguments.items() if fact and argument in names}
        return Entry(function, (function.__doc__ or "").partition("\n")[0], facts | {"parameters": tuple(names)})

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
ENVS.register(
    "maniskill",
    "embodrl.envs.maniskill.env:ManiSkillVectorEnv",
    "ManiSkill 3 (SAPIEN) table-top manipulation",
    tasks=("PushCube-v1", "PullCube-v1", "PickCube-v1", "StackCube-v1", "LiftPegUpright-v1"),
    action_dim=7,
)
ENVS.register(
    "toy",
    "embodrl.envs.toy:ToyVectorEnv",
    "a dot to be moved to a coloured goal; needs no simulator",
    tasks=("reach-red", "reach-green"),
    action_dim=7,
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
