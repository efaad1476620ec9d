"""A second policy as the reference of the KL (on-policy distillation)."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from embodrl.config.schema import Config
from embodrl.errors import CheckpointError
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.training.options import VALUE_GROUP
from embodrl.models.base import VLAPolicy
from embodrl.workers.policy import build_policy


def load_teacher(config: Config, policy: VLAPolicy, engine: TrainEngine) -> None:
    """Put the weights of ``algorithm.teacher`` in the place of an engine's reference.

    Args:
        config: configuration of the run.
        policy: the policy in this process, with the weights that the run starts from.
        engine: train engine that keeps a reference.

    Raises:
        CheckpointError: the teacher is of another size, has other action statistics, or differs in a weight that the
            run does not train, which policy and reference share (``teacher-differs``).
        EmbodrlError: it can't be loaded.
    """
    directory = config.algorithm.teacher
    model = config.model.model_copy(update={"model_path": None, "lora_path": None, "warm_start": directory})
    second = build_policy(config.model_copy(update={"model": model}), torch.device("cpu"))
    if not _same(getattr(second, "stats", None), getattr(policy, "stats", None)):
        raise CheckpointError(
            f"the teacher {directory} has other action statistics than the policy: its actions mean something else",
            "distil from a policy that was trained with the same dataset statistics",
            code="teacher-differs",
        )
    teacher = second.state_dict()
    saved = engine.state_dict()
    reference = saved.tensors["reference"]
    critic = {id(parameter) for parameter in policy.trainable_groups().get(VALUE_GROUP, [])}
    of_critic = {name for name, parameter in policy.named_parameters() if id(parameter) in critic}
    shared = {name: weight for name, weight in policy.state_dict().items() if name not in {*reference, *of_critic}}
    differing = [name for name, weight in shared.items() if not torch.equal(teacher[name], weight.cpu())]
    if differing:
        raise CheckpointError(
            f"the teacher {directory} differs from the policy in {len(differing)} weights that are not trained, such as"
            f" '{differing[0]}'; they share these",
            "start from the weights that the teacher was trained from, and train the same parts (model.trainable,"
            " model.freeze_vision, model.lora)",
            code="teacher-differs",
        )
    saved.tensors["reference"] = {name: teacher[name] for name in reference}
    engine.load_state_dict(saved)


def _same(left: object, right: object) -> bool:
    """Return whether two statistics have the same numbers; names of datasets do not matter."""
    if dataclasses.is_dataclass(left) and dataclasses.is_dataclass(right):
        names = [field.name for field in dataclasses.fields(left) if field.name != "key"]
        return type(left) is type(right) and all(_same(getattr(left, n), getattr(right, n)) for n in names)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return np.array_equal(left, right)
    return left is right or left == right
