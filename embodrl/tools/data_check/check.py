"""`embodrl data check`: demonstrations inspected, replayed in their simulator, and compared with a policy."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

from embodrl.config.schema import Config, SftConfig
from embodrl.data.demos import Demos
from embodrl.data.facts import DatasetFacts, read_facts
from embodrl.data.imitation import (
    check_demos,
    check_robot,
    load_checked_demos,
    load_configured_demos,
    load_untrained_demos,
    observed,
)
from embodrl.data.load import is_lerobot, load_demos
from embodrl.data.statistics import STATISTICS_FILE
from embodrl.errors import EmbodrlError, FileDamagedError
from embodrl.learners.imitation_policy import check_instructions, policy_with_statistics
from embodrl.models.base import VLAPolicy
from embodrl.runs.policies import find_policy
from embodrl.tools.data_check.checks import Checked, DataFinding, inspect, shown
from embodrl.types import Observation, SamplingParams
from embodrl.workers.repetition import repeat_groups, repeatable

logger = logging.getLogger(__name__)

SIDE = 64
"""Pixels that images are reduced to if no policy needs them."""
BATCH = 32
FRAMES = 256


@dataclass(frozen=True)
class Replay:
    """Demonstrations repeated open-loop from their seeds.

    Attributes:
        success: fraction that solved the task again.
        recorded_success: fraction that had solved it when recorded.
        picture_difference: mean difference (0 to 255) of the first images, recorded and replayed; None if sizes differ.
    """

    episodes: int
    success: float
    recorded_success: float
    picture_difference: float | None


@dataclass(frozen=True)
class PolicyErrors:
    """Errors of a policy on frames of the data.

    Attributes:
        episodes: number of their episodes; only held-out ones with ``held_out``.
        mean_abs_error: error of each action dimension, in units of the data, over the chunk.
        of_the_mean: error of always predicting the mean action, of the training data if known.
        of_zero: error of always predicting 0.
        out_of_range: fraction of the values outside the policy's range.
    """

    frames: int
    episodes: int
    mean_abs_error: list[float]
    of_the_mean: list[float]
    of_zero: list[float]
    out_of_range: list[float]


@dataclass(frozen=True)
class DataReport:
    """Result of a check; ``encoded`` is the number of instructions encoded for a model, None if none was named."""

    directory: Path
    facts: DatasetFacts
    num_episodes: int
    num_frames: int
    findings: list[DataFinding]
    replay: Replay | None = None
    policy: PolicyErrors | None = None
    encoded: int | None = None

    @property
    def has_errors(self) -> bool:
        """Whether a finding almost certainly spoils training."""
        return any(finding.level == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, object]:
        """Return the content of --json."""
        return {**asdict(self), "directory": str(self.directory)}


def check_data(
    directory: Path,
    config: Config | None,
    policy_dir: Path | None,
    episodes: int,
    overrides: list[str],
    keys: Mapping[str, str] | None = None,
    held_out: bool = False,
    model: Config | None = None,
) -> DataReport:
    """Check demonstrations.

    Args:
        directory: dataset directory.
        config: configuration of the simulator to replay in; None replays nothing.
        policy_dir: policy or run to compare with; None for none.
        episodes: limit on replayed episodes.
        overrides: overrides of the policy's configuration.
        keys: ``sft.keys``.
        held_out: compare the policy only with episodes that it was not trained on (``load_untrained_demos``).
        model: fine-tuning configuration for whose model all instructions are encoded; None encodes none.

    Raises:
        EmbodrlError: there are no demonstrations, or simulator or policy are not available.
    """
    facts = read_facts(directory, keys)
    try:
        demos = load_demos(directory, size=(SIDE, SIDE) if is_lerobot(directory) else None, keys=keys)
    except FileDamagedError as error:
        return DataReport(directory, facts, 0, 0, [DataFinding("error", "data-damaged", error.message, error.hint)])
    findings = inspect(demos, facts)
    replayed = None
    errors = None
    if config is not None:
        replayed, more = _replay(demos, facts, config, directory, episodes)
        findings += more
    if policy_dir is not None:
        errors, more = _compare(policy_dir, directory, overrides, held_out)
        findings += more
    if model is not None:
        findings += encode_instructions(model)
    findings.sort(key=lambda finding: finding.level != "error")
    encoded = None if model is None and policy_dir is None else len(demos.instruction_table)
    return DataReport(directory, facts, demos.num_episodes, len(demos.actions), findings, replayed, errors, encoded)


def encode_instructions(config: Config) -> list[DataFinding]:
    """Encode all instructions of ``sft.data_dir`` as a fine-tune would; return the failures."""
    try:
        demos = load_checked_demos(config)
        with TemporaryDirectory() as scratch:
            _, policy = policy_with_statistics(config, demos, Path(scratch) / STATISTICS_FILE, logger.info)
        check_instructions(policy, observed(demos, config))
    except EmbodrlError as error:
        return [DataFinding("error", error.code, error.message, error.hint)]
    return []


def _replay(
    demos: Demos, facts: DatasetFacts, config: Config, directory: Path, episodes: int
) -> tuple[Replay | None, list[DataFinding]]:
    """Repeat the actions of episodes with known seeds; without seeds, only compare stated facts."""
    config = config.model_copy(update={"sft": config.sft.model_copy(update={"data_dir": str(directory)})})
    findings: list[DataFinding] = []
    try:
        check_robot(config)
    except EmbodrlError as error:
        findings.append(DataFinding("error", error.code, error.message, error.hint))
    wanted = [camera.name for camera in config.env.cameras]
    # Without camera names, in the format raw, the cameras are the environment's, in its order.
    recorded = list(facts.cameras) if is_lerobot(directory) else wanted[: len(facts.cameras)]
    findings += camera_findings(recorded, wanted)
    rows = repeatable(demos, config)[:episodes]
    if facts.action_dim != config.model.action_dim or not rows:
        why = f"{facts.action_dim} action dimensions" if rows else "no episode has a seed and a task of env.tasks"
        message = f"the demonstrations can't be replayed in {config.env.env_type}: {why}"
        hint = "replay demonstrations of `embodrl collect` with the env, env.tasks and cameras of their collection"
        return None, [*findings, DataFinding("warning", "replay-impossible", message, hint)]
    result = _run_open_loop(demos, config, rows, recorded)
    if result.success < 0.5 * result.recorded_success:
        message = f"replayed, {result.success:.0%} of {result.episodes} episodes succeed, not"
        message += f" {result.recorded_success:.0%} as recorded"
        hint = (
            "actions do not reproduce the recording: another env, controller or units; collect.noise_std=0 for replays"
        )
        findings.append(DataFinding("warning", "replay-fails", message, hint))
    if result.picture_difference is not None and result.picture_difference > 10:
        message = f"first images differ from the simulator's by {result.picture_difference:.0f} of 255"
        findings.append(
            DataFinding("warning", "replay-pictures", message, "configure env.cameras as during the collection")
        )
    return result, findings


def camera_findings(recorded: list[str], wanted: list[str]) -> list[DataFinding]:
    """Compare the cameras of a dataset and an environment, by name and order; a single camera needs no name."""
    missing = [name for name in wanted if name not in recorded]
    if missing and not len(recorded) == len(wanted) == 1:
        message = f"the environment's cameras are {', '.join(wanted)}; the data have {', '.join(recorded) or 'none'}"
        hint = "set sft.cameras to the data's cameras, in the order of env.cameras"
        return [DataFinding("warning", "camera-missing", message, hint)]
    order = [name for name in recorded if name in wanted]
    if not missing and order != wanted:
        message = f"the data have {', '.join(order)}, in another order than the environment: {', '.join(wanted)}"
        hint = "`embodrl sft` matches them by name; give other software the environment's order"
        return [DataFinding("warning", "camera-order", message, hint)]
    return []


def picture_difference(before: NDArray[np.uint8], seen: NDArray[np.uint8], views: list[int]) -> float | None:
    """Return the mean absolute difference of images ``[N,V,H,W,3]``, the second reduced to the size of the first.

    None if the cameras differ; ``views`` is the index in ``before`` of each camera of ``seen``.
    """
    if len(views) != seen.shape[1]:
        return None
    from embodrl.data.lerobot_reader import resized

    size = (before.shape[2], before.shape[3])
    if seen.shape[2:4] != size:
        frames = [resized(frame, size) for row in seen for frame in row]
        seen = np.stack(frames).reshape(*seen.shape[:2], *size, 3)
    return float(np.abs(before[:, views].astype(np.float64) - seen).mean())


def _run_open_loop(demos: Demos, config: Config, rows: list[int], recorded: list[str]) -> Replay:
    solved: list[bool] = []
    differences: list[float] = []
    wanted = [camera.name for camera in config.env.cameras]
    single = len(recorded) == len(wanted) == 1
    views = [0] if single else [recorded.index(name) for name in wanted if name in recorded]
    for group, found in repeat_groups(demos, config, rows, np.clip(demos.actions, -1, 1)):
        before = demos.images[[np.argmax(demos.episode == n) for n in group]]
        difference = picture_difference(before, found.images, views)
        differences += [] if difference is None else [difference]
        solved += found.success.tolist()
    succeeded = [demos.success[n] is not False for n in rows]
    mean = float(np.mean(differences)) if differences else None
    return Replay(len(rows), float(np.mean(solved)), float(np.mean(succeeded)), mean)


def _compare(
    policy_dir: Path, directory: Path, overrides: list[str], held_out: bool
) -> tuple[PolicyErrors | None, list[DataFinding]]:
    source = find_policy(policy_dir)
    loaded = source.load_config([*overrides, f"sft.data_dir={directory}"], verb="sft")
    config = loaded.config
    mean: NDArray[np.float32] | None = None
    findings: list[DataFinding] = []
    try:
        if held_out:
            findings = _check_split(source.load_config([], verb="sft").config.sft, config.sft, directory)
            trained, demos = load_untrained_demos(config)
            mean = trained.actions.mean(axis=0)
        else:
            demos = load_configured_demos(config)
        check_demos(demos, config)
    except FileDamagedError:
        raise
    except EmbodrlError as error:
        return None, [DataFinding("error", error.code, error.message, error.hint)]
    policy = source.make_policy(config)
    try:
        check_instructions(policy, observed(demos, config))
    except EmbodrlError as error:
        return None, [DataFinding("error", error.code, error.message, error.hint)]
    errors = policy_errors(policy, demos, config.env.include_state, mean)
    return errors, [*findings, *_policy_findings(errors, policy, demos, config)]


def _check_split(trained: SftConfig, now: SftConfig, directory: Path) -> list[DataFinding]:
    """Compare the policy's training data with the data held to be its own; return a note.

    Raises:
        EmbodrlError: arguments split the data differently from the policy's run.
    """
    if trained.data_dir == SftConfig().data_dir:  # not from a run: the arguments say what it was trained on
        return []
    if (trained.max_episodes, trained.val_episodes) != (now.max_episodes, now.val_episodes):
        raise EmbodrlError(
            f"the policy was trained with sft.max_episodes={trained.max_episodes} and sft.val_episodes="
            f"{trained.val_episodes}, which decide what is held out",
            "leave both out",
            code="held-out-settings",
        )
    if Path(trained.data_dir).expanduser().resolve() == directory.expanduser().resolve():
        return []
    message = f"the policy was trained on {trained.data_dir}; {directory} has held-out episodes if it is a copy of that"
    return [DataFinding("warning", "held-out-other-dataset", message, "without --held-out all episodes are compared")]


def policy_errors(
    policy: VLAPolicy, demos: Demos, include_state: bool, mean: NDArray[np.float32] | None = None
) -> PolicyErrors:
    """Return the errors of a policy's most probable actions on frames spread evenly over demonstrations.

    Args:
        policy: policy to compare.
        demos: demonstrations with its cameras.
        include_state: the policy reads the state.
        mean: baseline mean action, ``float32[A]``; None for the mean of ``demos``.
    """
    frames = np.unique(np.linspace(0, len(demos.actions) - 1, FRAMES).astype(np.int64))
    always = demos.actions.mean(axis=0) if mean is None else mean
    state = demos.state if include_state else demos.state[:, :0]
    said: list[NDArray[np.float32]] = []
    with torch.no_grad():
        for part in np.array_split(frames, -(-len(frames) // BATCH)):
            seen = Observation(demos.images[part], state[part], demos.said(part), np.zeros(len(part), np.int32))
            said.append(policy.predict_action_batch(seen, "eval", SamplingParams(), compute_values=False).actions)
    chunks = np.concatenate(said)
    wanted, inside = demos.action_chunks(frames, chunks.shape[1])
    error = np.abs(chunks - wanted)[inside]
    plain = np.abs(always - wanted)[inside]
    zero = np.abs(wanted)[inside]
    outside = policy.out_of_range(demos.actions, demos.state).mean(axis=0)
    mae, of_the_mean, of_zero = (values.mean(axis=0).tolist() for values in (error, plain, zero))
    return PolicyErrors(len(frames), demos.num_episodes, mae, of_the_mean, of_zero, outside.tolist())


def _policy_findings(errors: PolicyErrors, policy: VLAPolicy, demos: Demos, config: Config) -> Iterator[DataFinding]:
    outside = np.flatnonzero(np.array(errors.out_of_range) > config.sft.max_clipped)
    if len(outside):
        message = f"action dimensions {shown(outside)} are out of the policy's range"
        yield DataFinding("error", "policy-range", message, "sft.stats=data computes statistics of the data")
    mae = np.array(errors.mean_abs_error)
    plain = np.array(errors.of_the_mean)
    span = np.ptp(demos.actions, axis=0)
    checked = Checked(demos, DatasetFacts({}, len(mae), 0, None, None))
    if inverted := [i for i in checked.binary if mae[i] > 0.75 * span[i]]:
        message = f"the policy predicts the opposite of the data in dimensions {shown(inverted)}"
        yield DataFinding("error", "gripper-inverted", message, "set model.gripper, or change the sign in the data")
    if worse := [i for i in checked.moving if mae[i] > plain[i]]:
        message = f"the policy is worse than the mean action in dimensions {shown(worse)}"
        yield DataFinding(
            "warning", "policy-untrained", message, "not trained on such data, or different units or cameras"
        )
