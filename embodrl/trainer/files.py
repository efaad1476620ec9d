"""The files of a run besides its checkpoints and metrics."""

from __future__ import annotations

import logging
import shlex
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodrl.config.policy_card import CARD_FILE, policy_card
from embodrl.config.schema import Config
from embodrl.deployment import Deployment
from embodrl.errors import CheckpointError, EmbodrlError, OutputError
from embodrl.fields import read_regular_file, unpack
from embodrl.hybrid_engines.weight_sync.buckets import num_bytes, trained_names
from embodrl.hybrid_engines.weight_sync.disk import VERSIONS_KEPT
from embodrl.models.base import VLAPolicy
from embodrl.models.common.lora import OWN_HEADS, rounds_when_merged, save_adapters
from embodrl.models.common.merging import adapter_factors, merged_state_dict
from embodrl.pipelines.select import algorithm_name
from embodrl.reporting.intervals import interval_text
from embodrl.reporting.metrics_file import MAX_BYTES as MAX_METRICS_BYTES
from embodrl.reporting.metrics_file import METRICS_FILE
from embodrl.reporting.rows import last_other_rates
from embodrl.reporting.trackers import MLFLOW_DATABASE
from embodrl.storage.atomic import ELSEWHERE_OF_RUNS, atomic_directory, output_error
from embodrl.storage.checkpoint import CHECKPOINTS_DIR, Checkpoint, CheckpointManager, preflight
from embodrl.storage.integrity import check_checksums, write_checksums
from embodrl.storage.json_file import write_json_file
from embodrl.version import __version__

logger = logging.getLogger(__name__)

LOG_FILE = "logs/embodrl.log"
TRACE_DIR = "logs/trace"
POLICY_DIR = "policy"
ADAPTERS_DIR = "adapters"
"""In a policy directory: its adapters, separate from their base model's weights."""
BEST_POLICY_DIR = "policy_best"
PUBLISHED_DIR = "weights"
EVAL_WEIGHTS_DIR = "eval_weights"
"""Policies to be evaluated in parallel with training."""
WEIGHT_SYNC_DIR = "weight_sync"
REPORT_FILE = "report.html"
METRICS_BLOB = "metrics"
MAX_REPORT_BYTES = 2**30
# Checked before the policy is built and its size known.
LEAST_FREE_BYTES = 64 * 2**20


def run_directory(config: Config) -> Path:
    """Return the directory of a new run."""
    runner = config.runner
    if runner.output_dir != "auto":
        return Path(runner.output_dir)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = runner.name
    if name == "auto":
        chosen = config.algorithm.adv_type
        algorithm = chosen.replace(":", "-") if ":" in chosen else algorithm_name(config)
        name = f"{config.env.env_type}-{config.model.model_type}-{algorithm}-{stamp}"
    return Path("outputs") / name


def refuse_earlier_run(run_dir: Path) -> None:
    """Refuse a directory that holds an earlier run, or a policy of another origin.

    Raises:
        OutputError: it does (``run-exists``).
    """
    path = run_dir / METRICS_FILE
    if (path.is_file() and path.stat().st_size) or any(run_dir.glob(f"{CHECKPOINTS_DIR}/step_*")):
        raise OutputError(
            f"{run_dir} holds an earlier run",
            f"`embodrl resume {run_dir}` continues it; or choose another runner.output_dir",
            code="run-exists",
        )
    if found := [name for name in (POLICY_DIR, BEST_POLICY_DIR) if (run_dir / name).exists()]:
        message = f"{run_dir / found[0]} exists, but not from a run in this directory, and would be replaced"
        raise OutputError(message, "choose another runner.output_dir, or move it away", code="run-exists")


@contextmanager
def removed_if_empty(directory: Path, ignored: Collection[str] = ()) -> Iterator[None]:
    """Remove an output directory without files when an error or a signal ends the block.

    ``ignored`` are relative paths of files that are not results. The directory may be missing.
    """
    try:
        yield
    except BaseException:  # also after a signal, which is re-raised: no empty directory may be left
        files = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
        if directory.is_dir() and all(name in ignored for name in files):
            shutil.rmtree(directory, ignore_errors=True)
        raise


def has_results(run_dir: Path) -> bool:
    """Return whether a run's final results exist and are intact; a warning names the ones that are not."""
    try:
        report = read_regular_file(run_dir / REPORT_FILE, MAX_REPORT_BYTES)
        listed = check_checksums(run_dir / POLICY_DIR)
    except OSError:
        return False
    except EmbodrlError as error:
        logger.warning("%s; it is exported again", error.message)
        return False
    if not report.rstrip().endswith(b"</html>"):
        logger.warning("%s is cut off; it is written again", run_dir / REPORT_FILE)
        return False
    if not listed:
        logger.warning("%s has no checksums; the policy is exported again", run_dir / POLICY_DIR)
    return listed


def is_exported(run_dir: Path) -> bool:
    """Return whether the policy exists and is intact; a warning names damaged files."""
    try:
        return check_checksums(run_dir / POLICY_DIR)
    except EmbodrlError as error:
        logger.warning("%s; it is exported again", error.message)
        return False


def sent_num_bytes(config: Config, deployment: Deployment, policy: VLAPolicy) -> int:
    """Return the bytes of weights that a run keeps on disk for other processes: a full version, and trained weights."""
    by_disk = deployment.rolls_out_in_processes and config.rollout.weight_sync == "disk"
    published = config.rollout.publish_weights or config.store_url is not None
    return (by_disk + published + config.runner.eval_async) * versions_num_bytes(policy)


def versions_num_bytes(policy: VLAPolicy) -> int:
    """Return the bytes of a directory of published weights: a full version, and trained weights."""
    weights = policy.state_dict()
    trained = sum(num_bytes(weights[name]) for name in trained_names(policy))
    return sum(map(num_bytes, weights.values())) + (VERSIONS_KEPT + 1) * trained


def exported_num_bytes(policy: VLAPolicy) -> int:
    """Return the size of the tensors of ``export_policy``: merged in float32, twice the size of a bf16 policy."""
    merged = merged_state_dict(policy, deferred=True)
    total = sum(map(num_bytes, merged.values()))
    if rounds_when_merged(policy):
        pairs = (adapter_factors(layer) for layer in policy.modules())
        total += sum(num_bytes(factor) for pair in pairs if pair is not None for factor in pair)
        total += sum(num_bytes(merged[name]) for name in merged if name.partition(".")[0] in OWN_HEADS)
    return total


def check_disk_space(
    run_dir: Path, config: Config, policy: VLAPolicy, state_num_bytes: int, *, keep_best: bool, sent: int = 0
) -> None:
    """Check the disk space for a run's checkpoints, plus one during writing, its policies and sent weights.

    Files already written by a resumed run count as part of that; an existing policy is replaced by one written next to
    it.

    Args:
        run_dir: run directory.
        config: run configuration.
        policy: exported policy.
        state_num_bytes: size of a checkpoint.
        keep_best: the run keeps the best checkpoint and policy, too.
        sent: bytes of the weights kept on disk for other processes.

    Raises:
        OutputError: the directory is not writable, or has too little free space.
    """
    exported = exported_num_bytes(policy)
    total = (config.runner.keep_last_n + 1 + keep_best) * state_num_bytes + (1 + keep_best) * exported + sent
    outputs = (
        run_dir / name
        for name in (CHECKPOINTS_DIR, POLICY_DIR, BEST_POLICY_DIR, PUBLISHED_DIR, EVAL_WEIGHTS_DIR, WEIGHT_SYNC_DIR)
    )
    written = sum(path.stat().st_size for output in outputs for path in output.rglob("*") if path.is_file())
    preflight(run_dir, max(total - written, state_num_bytes, exported))


def export_policy(
    policy: VLAPolicy, directory: Path, config: Config, *, elsewhere: str = ELSEWHERE_OF_RUNS, **facts: Any
) -> None:
    """Write the policy in its public layout with ``embodrl.json`` (its training) and checksums, atomically.

    Adapters are merged. Adapters over half-precision weights are also written separately (``adapters``): merged, even
    in float32, they are rounded during multiplication and would not act as trained.

    Args:
        policy: policy with the weights to write.
        directory: new, or with an older policy.
        config: training configuration.
        elsewhere: how to choose another place, for the error's hint.
        facts: further entries of embodrl.json, e.g. ``iteration``.

    Raises:
        OutputError: the directory is not writable; its previous contents are unchanged.
    """
    try:
        with atomic_directory(directory) as staging:
            # In the staging directory, so that the next save removes leftovers of a killed one.
            inner = staging / directory.name
            policy.save_pretrained(inner)
            for path in inner.iterdir():
                path.rename(staging / path.name)
            inner.rmdir()
            if rounds_when_merged(policy) and (base := base_of(config)) is not None:
                save_adapters(policy, staging / ADAPTERS_DIR, base)
            facts |= {} if policy.seen_state_dim is None else {"state_dim": policy.seen_state_dim}
            card = policy_card(config, **facts, embodrl=__version__, date=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
            write_json_file(staging / CARD_FILE, card)
            adapter_files = [path.relative_to(staging).as_posix() for path in (staging / ADAPTERS_DIR).rglob("*")]
            write_checksums(staging, added=[CARD_FILE, *adapter_files])
    except OutputError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        # The family's own files refer to a directory that no longer exists.
        raise output_error(f"{directory} can't be written", directory, error.__cause__, elsewhere) from error


def base_of(config: Config) -> str | None:
    """Return the base model of a run's adapters; None if its weights cannot be loaded again."""
    model = config.model
    return None if model.lora_path is not None else model.model_path or model.warm_start


def saved_metrics(checkpoint: Checkpoint) -> bytes:
    """Return metrics.jsonl as it was when a checkpoint was made.

    Raises:
        CheckpointError: it is damaged, or larger than a metrics file can be.
    """
    try:
        return unpack(checkpoint.blob(METRICS_BLOB), MAX_METRICS_BYTES)
    except ValueError as error:
        hint = "resume a copy of the run, or a run of your own"
        message = f"the rows of metrics in {checkpoint.path} can't be read: {error}"
        raise CheckpointError(message, hint, code="checkpoint-damaged") from error


def resume_hint(run_dir: Path) -> str:
    """Return the hint for a run that an error ended."""
    checkpoint, _ = CheckpointManager(run_dir, 1).latest_good()
    return hint_from(run_dir, None if checkpoint is None else checkpoint.path)


def hint_from(run_dir: Path, checkpoint: Path | None) -> str:
    """Return how a run with this newest checkpoint continues."""
    if checkpoint is None:
        return "rerun the command (no checkpoint was saved yet)"
    return f"`embodrl resume {run_dir}` continues from {checkpoint}"


def unsaved_run_message(run_dir: Path, iteration: int) -> str:
    """Return the message for a run whose last save, after ``iteration``, failed."""
    checkpoint, _ = CheckpointManager(run_dir, 1).latest_good()
    where = "start over (no checkpoint was saved yet)" if checkpoint is None else f"continue from {checkpoint.path}"
    return f"could not save iteration {iteration}, the last; `embodrl resume {shlex.quote(str(run_dir))}` will {where}"


def summary_lines(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the console lines of a finished run: success before and after, and the next command."""
    evaluated = [row for row in rows if isinstance(row.get("eval/success_rate"), float)]
    lines: list[str] = []
    if evaluated:
        first = evaluated[0]
        last = evaluated[-1]
        start = f"{100 * first['eval/success_rate']:.1f} -> " if first is not last else ""
        rates, iteration = last_other_rates(evaluated)
        others = "".join(f", {name} {100 * rate:.1f} %" for name, rate in rates.items())
        others += "" if iteration is None else f" (iteration {iteration})"
        lines.append(
            f"done: evaluation success {start}{100 * last['eval/success_rate']:.1f} %{interval_text(last)}{others}"
        )
        best = max(evaluated[1:], key=lambda row: row["eval/success_rate"], default=last)
        if best["eval/success_rate"] > last["eval/success_rate"] and (run_dir / BEST_POLICY_DIR).is_dir():
            rate = f"{100 * best['eval/success_rate']:.1f} % after iteration {best['iteration']}"
            lines.append(f"best evaluation: {rate}, exported to {run_dir / BEST_POLICY_DIR}")
    else:
        lines.append("done")
    return [*lines, f"next: embodrl eval {shlex.quote(str(run_dir))}"]


def offline_lines(config: Config, run_dir: Path) -> list[str]:
    """Return a line for each tracker whose run is in the directory: how to see or upload it."""
    logger, found = config.runner.logger, list[str]()
    if logger.wandb_mode == "offline":
        found.append(f"W&B, offline: `wandb sync {shlex.quote(str(run_dir / 'wandb'))}/offline-run-*` uploads it")
    if logger.mlflow_mode == "offline":
        uri = f"sqlite:///{(run_dir / 'mlflow' / MLFLOW_DATABASE).absolute()}"
        found.append(f"MLflow, offline: `mlflow ui --backend-store-uri {shlex.quote(uri)}` shows it")
    if logger.swanlab_mode == "offline":
        found.append(f"SwanLab, offline: `swanlab sync {shlex.quote(str(run_dir / 'swanlab'))}/run-*` uploads it")
    return found


def drop_missing_warm_start(config: Config) -> Config:
    """Start from random weights if the warm start is missing; the checkpoint replaces them all."""
    model = config.model
    if model.model_path is not None or model.warm_start in (None, "builtin"):
        return config
    if (Path(model.warm_start).expanduser() / "config.json").is_file():
        return config
    logger.warning(
        "the warm start %s is missing: weights come from the checkpoint, vocabulary and action statistics are the"
        " tiny size's own",
        model.warm_start,
    )
    return config.model_copy(update={"model": model.model_copy(update={"warm_start": None, "lora_path": None})})
