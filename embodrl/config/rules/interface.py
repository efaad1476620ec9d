"""Agreement of policy and environment on the meaning of actions and observations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast, get_args

from embodrl.config.policy_card import policy_directory, read_card
from embodrl.config.rules.base import Context, note, rule
from embodrl.config.schema import ModelConfig
from embodrl.interface import CONVERTED, Interface
from embodrl.rule_set import Finding

GRIPPERS: tuple[str, ...] = get_args(ModelConfig.model_fields["gripper"].annotation)
KEYS = {"gripper": "model.gripper", "cameras": "env.cameras", "state": "env.include_state"}
"""Setting that resolves a difference; nothing resolves the others."""


def env_interface(context: Context) -> Interface | None:
    """Return the interface that the environment declares."""
    spec = context.simulator
    return None if spec is None or spec.interface is None else spec.interface(context.config.env)


def policy_interface(context: Context) -> tuple[Interface | None, bool]:
    """Return the interface that the policy declares, with its own gripper, and whether there are trained weights at
    all.
    """
    model = context.config.model
    family = context.family
    directory = policy_directory(model)
    card = None if directory is None else read_card(directory)
    if card is not None:
        content = card.get("interface")
        return Interface.of(cast(dict[str, object], content)) if isinstance(content, dict) else None, True
    if model.model_path is None and directory is None:
        return None, False
    return (None if family is None or family.interface is None else family.interface(context)), True


@rule("env", "model")
def interfaces_agree(context: Context) -> Iterator[Finding]:
    """Actions and observations mean the same to the policy and the environment."""
    policy, _ = policy_interface(context)
    env = env_interface(context)
    if policy is None or env is None or context.resuming or context.verb in ("collect", "sft"):
        return
    setting = context.config.model.gripper
    env_type = context.config.env.env_type
    arriving = CONVERTED.get((setting, policy.gripper or ""), policy.gripper)
    for name, mine, theirs in replace(policy, gripper=arriving).differences(env):
        key = KEYS.get(name, "env.env_type")
        message = f"{name}: the policy's is {_text(mine)}, {env_type}'s is {_text(theirs)}"
        yield Finding(key, message, _hint(name, policy, theirs), others=("model.model_path",))


def _hint(name: str, policy: Interface, wanted: object) -> str:
    if name == "gripper":
        found = [s for s in GRIPPERS if CONVERTED.get((s, policy.gripper or ""), policy.gripper) == wanted]
        return f"set model.gripper={found[0]}" if found else "no value of model.gripper converts it"
    if name == "cameras":
        return f"give env.cameras these names in this order: {_text(policy.cameras)}"
    if name == "state":
        return "choose the environment whose state it was trained with, or a policy that reads none"
    return "no setting converts it: choose the environment of the policy's training, or fine-tune it (embodrl sft)"


def _text(value: object) -> str:
    return ", ".join(cast(tuple[str, ...], value)) if isinstance(value, tuple) else str(value)


@note("model.model_path", "env.env_type")
def interface_is_stated(context: Context) -> Iterator[Finding]:
    """The training data of a checkpoint, and so the meaning of its actions, are known."""
    policy, trained = policy_interface(context)
    env = env_interface(context)
    if policy is None and trained and env is not None and context.config.model.model_path is not None:
        gripper = f", gripper {env.gripper}" if env.gripper else ""
        yield Finding(
            "model.model_path",
            "the meaning of its actions is not stated, so it is not compared with"
            f" {context.config.env.env_type}: {env.action}, rotation {env.rotation}{gripper}",
            "check it where the checkpoint was published",
        )
