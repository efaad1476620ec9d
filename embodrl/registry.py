"""Names to objects, resolved lazily: asking whether a name exists imports neither torch nor a simulator."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from embodrl.errors import EmbodrlError, UnknownNameError


def nearest(name: str, known: list[str]) -> str:
    """Return the known name closest to ``name``, or "" if none is near."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return matches[0] if matches else ""


def import_object(path: str) -> Any:
    """Return the object that ``module:attribute`` names.

    Raises:
        EmbodrlError: the path is not of that form, or there is no such module or attribute.
    """
    module_name, separator, attribute = path.partition(":")
    if not separator or not module_name or not attribute:
        raise EmbodrlError(f"'{path}' is not of the form module:attribute", "write my_package.my_module:my_function")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except AttributeError as error:
        raise EmbodrlError(f"module '{module_name}' has no attribute '{attribute}'") from error


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
for _name, _title, _uses_state, _checkpoint in (
    ("pi0", "pi0", True, "openpi's PyTorch conversion, or lerobot's pi0 layout"),
    ("pi05", "pi0.5", "model.pi.discrete_state", "openpi's PyTorch conversion, or lerobot's pi05 layout"),
):
    MODELS.register(
        _name,
        f"embodrl.models.pi.build:build_{_name}",
        f"{_title}: PaliGemma and a flow-matching action expert",
        **{**_FLOW_FACTS, "uses_state": _uses_state},
        max_cameras=3,
        dimensions="pi",
        parity="embodrl.models.pi.parity:run",
        sizes="tiny, about 3.3 B",
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
    sizes="tiny, about 2.7 B",
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

ADVANTAGES = Registry("advantage estimator")
ADVANTAGES.register("gae", "embodrl.algorithms.advantages:gae", "generalised advantage estimation", needs_values=True)

LOSSES = Registry("loss")
LOSSES.register(
    "actor_critic", "embodrl.algorithms.losses:actor_critic_loss", "PPO clip with a value loss", needs_values=True
)
LOSSES.register("actor", "embodrl.algorithms.losses:actor_loss", "PPO clip without a critic", needs_values=False)
