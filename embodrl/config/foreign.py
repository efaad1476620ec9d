"""Names that users of other systems type, and what they are called here."""

from __future__ import annotations

from collections.abc import Mapping

_OWN = "register an environment of your own (docs/tutorial.md), or choose one of `embodrl list envs`"
_GAE = "write algorithm.adv_type=gae, PPO's estimator; algorithm=ppo chooses estimator and loss"
_PPO_LOSS = "write algorithm.loss_type=actor_critic, PPO's loss with a critic; algorithm=ppo chooses estimator and loss"
FOREIGN: Mapping[tuple[str, str], tuple[str, str]] = {
    ("model", "openpi"): ("pi05", "openpi's models are model=pi0, model=pi05 and model=pi0_fast"),
    ("model", "pi0.5"): ("pi05", "write model=pi05"),
    ("rollout", "sglang"): ("vllm", "SGLang is not supported; write rollout=vllm, or rollout=native"),
    ("rollout", "hf"): ("native", "write rollout=native"),
    ("actor", "fsdp2"): ("fsdp", "write actor=fsdp, which is FSDP2"),
    ("env", "libero_long"): ("libero_10", "write env=libero_10"),
    ("algorithm", "reinforce++"): ("reinforce_pp", "write algorithm=reinforce_pp"),
    ("algorithm.adv_type", "ppo"): ("gae", _GAE),
    ("algorithm.adv_type", "embodied_gae"): ("gae", _GAE),
    ("algorithm.loss_type", "ppo"): ("actor_critic", _PPO_LOSS),
    ("algorithm.loss_type", "ppo_actor_critic"): ("actor_critic", _PPO_LOSS),
} | {
    ("env", name): ("", f"{title} is not built in; {_OWN}")
    for name, title in {
        "behavior": "BEHAVIOR (OmniGibson)",
        "calvin": "CALVIN",
        "isaaclab": "Isaac Lab",
        "robocasa": "RoboCasa",
        "robotwin": "RoboTwin",
        "simpler": "SIMPLER",
    }.items()
}
"""(preset group or key, name elsewhere in lower case) -> (present name, "" if there is none; what to write)."""


def advice(key: str, name: str) -> tuple[str, str] | None:
    """Return the nearest name here and a hint for a name of another system; None if it is not known."""
    return FOREIGN.get((key, name.lower()))
