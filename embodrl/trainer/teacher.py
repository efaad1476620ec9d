"""A second policy as the reference of the KL (on-policy distillation)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodrl.config.policy_card import known_instructions, read_card
from embodrl.config.schema import Config
from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.fields import read_fields
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.hybrid_engines.training.options import VALUE_GROUP
from embodrl.models.base import VLAPolicy
from embodrl.models.common.teacher import build_teacher, inputs_for, is_apart
from embodrl.storage.json_file import write_json_file
from embodrl.trainer.session import RunSession
from embodrl.types import Observation
from embodrl.workers.policy import build_policy, param_dtype, weights_fingerprint

RECORD = "teacher.json"
"""File in a run's directory that identifies a teacher that is a network of its own."""
_MAX_BYTES = 4096


def check_teacher(session: RunSession) -> None:
    """Raise CheckpointError (``teacher-changed``) if a resumed run's teacher is no longer what it was.

    A teacher that is a network of its own is in its directory, any other one in the checkpoint.
    """
    config = session.config
    if config.algorithm.teacher is None or not config.algorithm.kl.coef or session.checkpoint is None:
        return
    if (session.directory / RECORD).exists() != is_apart(config):
        raise _changed(config)


def _changed(config: Config) -> CheckpointError:
    return CheckpointError(
        f"the teacher {config.algorithm.teacher} is not what it was at the start of the run",
        "restore its directory, or start a new run from policy/",
        code="teacher-changed",
    )


def load_teacher(session: RunSession, policy: VLAPolicy, engine: TrainEngine) -> None:
    """Put the weights of ``algorithm.teacher`` in the place of an engine's reference, or check a network of its own.

    Args:
        session: attempt at the run; a resumed one has the reference in its checkpoint.
        policy: the policy in this process, with the weights that the run starts from.
        engine: train engine; it keeps a reference unless the teacher is a network of its own.

    Raises:
        CheckpointError: the teacher's inputs or actions mean something else; it differs in a weight that the run does
            not train, which policy and reference share (``teacher-differs``); or it has changed since the start of the
            run (``teacher-changed``).
        EmbodrlError: it can't be loaded.
    """
    if is_apart(session.config):
        _check_apart(session, policy)
    elif session.checkpoint is None:
        _take_weights(session.config, policy, engine)


def _check_apart(session: RunSession, policy: VLAPolicy) -> None:
    config = session.config
    teacher = build_teacher(config, "cpu", param_dtype(config))
    if wrong := _differences(config, teacher, policy):
        raise CheckpointError(
            f"the teacher {config.algorithm.teacher} and the policy differ in {wrong}",
            "a teacher of another size or family reads the policy's inputs and judges its actions: train both with the"
            " same cameras, states, prompts, tokens and statistics",
            code="teacher-differs",
        )
    record, found = session.directory / RECORD, weights_fingerprint(teacher)
    if session.checkpoint is None:
        write_json_file(record, {"weights": found})
    elif read_fields(record, CheckpointError, max_bytes=_MAX_BYTES, follow_links=False).content != {"weights": found}:
        raise _changed(config)


def _differences(config: Config, teacher: VLAPolicy, policy: VLAPolicy) -> str:
    """Return what separates a teacher's actions and inputs from a policy's; "" if it can judge its actions."""
    for what, mine, theirs in zip(_MEANING, _meaning(policy), _meaning(teacher), strict=True):
        if not _same(mine, theirs):
            return what
    if getattr(policy, "vision_is_frozen", False):
        return "pictures: rollouts keep the policy's own features of them (model.freeze_vision, model.trainable)"
    seen = _probe(config, policy)
    mine = inputs_for(teacher, policy.preprocess(seen))
    for name, wanted in teacher.preprocess(seen).items():
        if name not in mine or not torch.equal(mine[name].cpu(), wanted):
            return f"the input '{name}'"
    return ""


_MEANING = ("chunks", "action dimensions", "tokens", "statistics of actions", "the gripper", "the kind of actions")


def _meaning(policy: VLAPolicy) -> tuple[object, ...]:
    """Return what an action, as rollouts record it, means to a policy; as in ``_MEANING``."""
    bins, vocabulary = getattr(policy, "bins", None), getattr(policy, "vocabulary", None)
    network = getattr(policy, "model", None)
    return (
        (policy.num_action_chunks, policy.action_horizon),
        (policy.action_dim, getattr(policy, "padded_action_dim", None)),
        (None if bins is None else (bins.action_vocab_size, bins.num_bins), _tokens(vocabulary)),
        getattr(policy, "stats", None),
        getattr(policy, "gripper", None),
        getattr(getattr(network, "spec", None), "categorical", None),
    )


def _tokens(vocabulary: Any) -> object:
    return None if vocabulary is None else vocabulary.meaning()


def _probe(config: Config, policy: VLAPolicy) -> Observation:
    """Return an observation with noise for pictures and state, of the sizes that the run has."""
    draws = np.random.default_rng(0)
    sizes = {(camera.height, camera.width) for camera in config.env.cameras}
    height, width = sizes.pop() if len(sizes) == 1 else (1, 1)
    images = draws.integers(0, 256, (1, len(config.env.cameras), height, width, 3), np.uint8)
    state_dim = policy.seen_state_dim or (read_card(Path(str(config.algorithm.teacher))) or {}).get("state_dim") or 0
    state = draws.uniform(-0.5, 0.5, (1, int(state_dim))).astype(np.float32)
    text = next((text for text in known_instructions(config).values() if text), "do it")
    return Observation(images, state, [text], np.zeros(1, np.int32))


def _take_weights(config: Config, policy: VLAPolicy, engine: TrainEngine) -> None:
    """Put the weights of a teacher of the policy's shapes in the place of the engine's reference."""
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
