"""Names to objects, resolved lazily: asking whether a name exists imports neither torch nor a simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from embodrl.errors import EmbodrlError, UnknownNameError
from embodrl.names import import_function, import_object, nearest, parameters_of


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

    def register_function(self, name: str, function: Callable[..., object], description: str = "") -> None:
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

    def _facts(self, name: str, function: Callable[..., object]) -> dict[str, object]:
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
        facts: dict[str, object] = {fact: False for fact in self.arguments.values() if fact}
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
