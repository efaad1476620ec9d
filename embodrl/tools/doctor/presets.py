"""Which of the shipped presets run on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from embodrl.config import Config, load_config
from embodrl.config.presets import presets
from embodrl.errors import ConfigError, ConfigProblem
from embodrl.specs import ENVS, MODELS

GROUPS = ("env", "model", "experiment")
PARTNERS = {
    "env": ("", "model=mlp", "model=mlp env.state=full experiment=human_in_the_loop"),
    "model": ("", "env=libero_spatial"),
}
"""Partner presets, as documented, of presets that do not fit the defaults: a model without language, LIBERO."""
# Weights, gradients and the two moments of AdamW, all in actor.param_dtype.
COPIES_IN_TRAINING = 4
BYTES = {"fp32": 4, "bf16": 2}
GIB = 1 << 30


@dataclass(frozen=True)
class CheckedMachine:
    """Results of the checks that matter for presets.

    Attributes:
        simulators: env_type -> why it does not run here; "" if it does. An env_type that was not checked is absent.
        gpu_bytes: memory of each CUDA GPU that torch can use.
    """

    simulators: dict[str, str]
    memory_bytes: int
    gpu_bytes: tuple[int, ...]
    has_wandb: bool


def lacks(config: Config, machine: CheckedMachine) -> str:
    """Return the missing requirement of a configuration; "" if it runs."""
    missing: list[str] = []
    simulator = machine.simulators.get(config.env.env_type, "")
    if simulator:
        missing.append(simulator)
    wants_gpu = {"cluster.device=cuda": config.cluster.device == "cuda"}
    for name, value in ENVS.entry(config.env.env_type).gpu_settings.items():
        wants_gpu[f"env.{name}={value}"] = getattr(config.env, name) == value
    if not machine.gpu_bytes:
        missing += [f"{setting} needs a CUDA GPU" for setting, wanted in wants_gpu.items() if wanted]
    if config.model.model_path is None and (count := _num_parameters(config)):
        needed = count * BYTES[config.actor.param_dtype] * COPIES_IN_TRAINING
        on_gpu = bool(machine.gpu_bytes) and config.cluster.device != "cpu"
        room = max(machine.gpu_bytes) if on_gpu else machine.memory_bytes
        if needed > room:
            place = "GPU memory" if on_gpu else "memory"
            precision = config.actor.param_dtype
            missing.append(
                f"training in {precision} needs about {needed / GIB:.0f} GiB of {place}, {room / GIB:.0f} GiB are there"
            )
    if config.runner.logger.wandb_mode != "off" and not machine.has_wandb:
        missing.append("W&B needs pip install 'embodrl[wandb]'")
    return "; ".join(missing)


def _num_parameters(config: Config) -> int:
    """Return the number of parameters of a model without a checkpoint; 0 for a remote model."""
    family = MODELS.entry(config.model.model_type)
    if family.only_acts:
        return 0
    if family.num_parameters is not None:
        return family.num_parameters(config.model)
    import torch

    from embodrl.models.registry import build_policy

    shape = config.model.model_copy(update={"warm_start": None, "unnorm_key": None})  # the size defined by the section
    policy, _ = build_policy(shape, device="meta", dtype=torch.bfloat16, seed=0)
    return sum(parameter.numel() for parameter in policy.parameters())


def preset_lacks(machine: CheckedMachine) -> dict[str, str]:
    """Return each preset, with its documented partner if needed, and its missing requirement.

    ``group=preset`` or ``group=preset group=preset`` -> "" if it runs with all other settings at their defaults.
    """
    return dict(judge(group, name, machine) for group in GROUPS for name in presets(group))


def judge(group: str, name: str, machine: CheckedMachine) -> tuple[str, str]:
    """Return an item of ``preset_lacks``."""
    problems: list[ConfigProblem] = []
    for partner in PARTNERS.get(group, ("",)):
        choices = [f"{group}={name}", *partner.split()]
        try:
            return " ".join(choices), lacks(load_config(choices).config, machine)
        except ConfigError as error:
            problems = min(filter(None, (problems, error.problems)), key=len)
    keys = ", ".join(dict.fromkeys(problem.key for problem in problems))
    return f"{group}={name}", f"needs settings: {keys}, see `embodrl config validate {group}={name}`"
