"""A second policy as the reference of the KL (on-policy distillation)."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from embodrl.config.schema import Config
from embodrl.errors import CheckpointError, EmbodrlError
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
    second = _build(config)
    if not all(_same(*pair) for pair in zip(_conventions(second), _conventions(policy), strict=True)):
        raise CheckpointError(
            f"the teacher {config.algorithm.teacher} and the policy differ in what their inputs or actions mean",
            "distil from a policy of the same architecture, trained with the same statistics of actions and states",
            code="teacher-differs",
        )
    teacher = second.state_dict()
    saved = engine.state_dict()
    reference = saved.tensors["reference"]
    critic = {id(parameter) for parameter in policy.trainable_groups().get(VALUE_GROUP, [])}
    of_critic = {name for name, parameter in policy.named_parameters() if id(parameter) in critic}
    shared = {name: weight for name, weight in policy.state_dict().items() if name not in {*reference, *of_critic}}
    missing = [name for name in (*shared, *reference) if name not in teacher]
    differing = missing or [name for name, weight in shared.items() if not torch.equal(teacher[name], weight.cpu())]
    if differing:
        raise CheckpointError(
            f"the teacher {config.algorithm.teacher} differs from the policy in {len(differing)} weights that are not"
            f" trained, such as '{differing[0]}'; they share these",
            "start from the weights that the teacher was trained from, and train the same parts (model.trainable,"
            " model.freeze_vision)",
            code="teacher-differs",
        )
    saved.tensors["reference"] = {name: teacher[name] for name in reference}
    engine.load_state_dict(saved)


def _build(config: Config) -> VLAPolicy:
    """Return the teacher, on the CPU; loaded as the policy is, with its own statistics."""
    directory = config.algorithm.teacher
    from_checkpoint = config.model.model_path is not None
    places = {"model_path": directory, "warm_start": None} if from_checkpoint else {"warm_start": directory}
    model = config.model.model_copy(update={**places, "stats_path": None, "lora_path": None})
    try:
        return build_policy(config.model_copy(update={"model": model}), torch.device("cpu"))
    except EmbodrlError as error:
        error.add(f"while loading algorithm.teacher={directory}")
        raise


def _conventions(policy: VLAPolicy) -> tuple[object, ...]:
    """Return what, besides weights, decides what a policy's inputs and outputs mean."""
    network = getattr(policy, "model", None)
    sizes = (policy.num_action_chunks, policy.action_dim, policy.action_horizon)
    buffers = tuple(sorted(name for name, _ in policy.named_buffers()))
    of_network = (getattr(network, name, None) for name in ("spec", "config"))
    return sizes, buffers, *of_network, getattr(policy, "stats", None)


def _same(left: object, right: object) -> bool:
    """Return whether two statistics have the same numbers; names of datasets do not matter."""
    if dataclasses.is_dataclass(left) and dataclasses.is_dataclass(right):
        names = [field.name for field in dataclasses.fields(left) if field.name != "key"]
        return type(left) is type(right) and all(_same(getattr(left, n), getattr(right, n)) for n in names)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return np.array_equal(left, right)
    return left is right or left == right
