"""Output of `embodrl eval`: eval.json, eval.html and videos."""

from __future__ import annotations

import hashlib
import math
import platform
import time
from pathlib import Path

import torch
from torch import nn

from embodrl.config.protocol import protocol_of
from embodrl.config.schema import Config
from embodrl.errors import OutputError
from embodrl.reporting.eval_grid import Tile, write_grid
from embodrl.reporting.eval_report import (
    AgentFigures,
    AxisFigures,
    EpisodeFigures,
    EvalContent,
    OtherFigures,
    TaskFigures,
    eval_page,
)
from embodrl.reporting.harness import harness_result
from embodrl.reporting.intervals import CONFIDENCE, CONFIDENCE_TEXT, wilson_interval
from embodrl.reporting.paired import change_text, compare_pairs
from embodrl.specs import ENVS, MODELS
from embodrl.storage.json_file import check_json_file, write_json_file, write_text_file
from embodrl.trainer.afterwards import afterwards
from embodrl.trainer.provenance import compute_text, describe_compute, describe_process, versions
from embodrl.types import Decoding
from embodrl.version import __version__
from embodrl.workers.env import check_videos
from embodrl.workers.evaluator import EpisodeRecord, EvalResult

ACTIONS: dict[Decoding, str] = {
    "greedy": "greedy (most probable)",
    "sampled": "sampled, as in training",
    "mean": "mean (nearest to the mean)",
}
JSON_FILE = "eval.json"
HTML_FILE = "eval.html"
GRID_FILE = "grid.mp4"
VIDEO_DIR = "videos"
# Above this number of tasks the console shows only the total.
MAX_LINES = 20


class EvalDirectory:
    """Output directory of an evaluation.

    Args:
        config: configuration of the evaluation.
        directory: new or empty directory; None creates one with the time in its name.
        weights: source of the weights; None is the one in ``config.model``.

    Attributes:
        directory: directory of all output.
        simulator: versions and driver reported by a simulator process.
        video_dir: directory for the simulators' videos; None without videos.
        axes: results of the same episodes with perturbations, by axis.

    Raises:
        OutputError: the directory is not empty, or can't be written.
        MissingDependencyError: the video writer is not installed.
    """

    def __init__(self, config: Config, directory: Path | None, weights: str | None = None) -> None:
        self.config = config
        self.weights = weights or config.model.model_path or config.model.warm_start or "random"
        self.weights_sha256 = ""
        self.simulator: dict[str, object] = {}
        check_videos(config, here=True)
        self.directory = directory or self._new_directory()
        if self.directory.exists() and not self.directory.is_dir():
            raise OutputError(
                f"{self.directory} is a file, not a directory",
                "name a new directory with --output",
                code="output-not-a-directory",
            )
        if self.directory.is_dir() and any(self.directory.iterdir()):
            raise OutputError(
                f"{self.directory} is not empty", "name a new directory with --output", code="output-not-empty"
            )
        check_json_file(self.directory / JSON_FILE, make_directory=True)
        self.video_dir = self.directory / VIDEO_DIR if config.env.video.enabled else None
        self.axes: dict[str, EvalResult] = {}

    def _new_directory(self) -> Path:
        parent = self.config.runner.output_dir
        stamp = f"eval-{time.strftime('%Y%m%d-%H%M%S')}"
        path = (Path("outputs") if parent == "auto" else Path(parent)) / stamp
        for number in range(2, 1000):
            if not path.exists():
                break
            path = path.with_name(f"{stamp}-{number}")
        return path

    def videos_of(self, axis: str | None) -> Path | None:
        """Return the video directory of an axis, or of the unperturbed episodes; None without videos."""
        return self.video_dir if axis is None or self.video_dir is None else self.video_dir / axis

    def identify(self, policy: nn.Module) -> None:
        self.weights_sha256 = weights_hash(policy)

    def content(self, result: EvalResult) -> EvalContent:
        by_task: dict[str, list[EpisodeRecord]] = {}
        for record in result.records:
            by_task.setdefault(record.task, []).append(record)
        solved, some = sum(result.successes), result.episodes > 0  # JSON has no NaN: None without an episode
        content: EvalContent = {
            "success_rate": result.success_rate if some else None,
            "success_at_end": None if math.isnan(result.success_at_end) else result.success_at_end,
            "interval": wilson_interval(solved, result.episodes),
            "confidence": CONFIDENCE,
            "successes": solved,
            "solved_at_first_step": result.solved_at_first_step,
            "episodes": result.episodes,
            "lost_episodes": result.lost_episodes,
            "per_task": result.per_task,
            "mean_return": result.mean_return if some else None,
            "mean_length": result.mean_length if some else None,
            "seed": self.config.env.eval.seed,
            "tasks": {task: _task(records) for task, records in by_task.items()},
            "settings": self._settings(result),
            "protocol": protocol_of(self.config),
            "versions": {"embodrl": __version__, "python": platform.python_version(), **versions()},
            "compute": describe_compute(self.config),
            "simulator": self.simulator,
            "first_pictures": result.first_pictures,
            "axes": {name: self._axis(name, result, perturbed) for name, perturbed in self.axes.items()},
            "decodings": {name: _other(result, one) for name, one in result.by_decoding.items()},
            "per_episode": [EpisodeFigures(**vars(record)) for record in result.records],
        }
        if result.per_agent:
            content["per_agent"] = {agent: _agent(*figures) for agent, figures in result.per_agent.items()}
        return content

    def _axis(self, name: str, plain: EvalResult, perturbed: EvalResult) -> AxisFigures:
        axis = ENVS.entry(self.config.env.env_type).axes[name]
        return {"group": axis.group, "description": axis.description, **_other(plain, perturbed)}

    def harness_content(self, result: EvalResult) -> dict[str, object]:
        """Return the result in the format of vla-evaluation-harness."""
        env = self.config.env
        content = self.content(result)
        benchmark = str(getattr(env, "suite", None) or env.env_type)
        kept: dict[str, object] = {name: content[name] for name in ("settings", "protocol", "versions", "simulator")}
        kept |= {"params": {"seed": env.eval.seed}}
        episodes = content["per_episode"]
        return harness_result(benchmark, env.tasks, episodes, env.eval.num_episodes, env.eval.seed, kept)

    def _settings(self, result: EvalResult) -> dict[str, object]:
        env = self.config.env
        model = self.config.model
        process = describe_process()
        seeds = f"{env.eval.seed} to {env.eval.seed + env.eval.num_episodes - 1}"
        return {
            "environment": env.env_type,
            "tasks": list(env.tasks),
            "model": model.model_type,
            "weights": self.weights,
            "weights SHA-256": self.weights_sha256,
            "actions": ACTIONS[result.decoding],
            **self._sampling(),
            "actions per chunk": model.num_action_chunks,
            "step limit": env.max_episode_steps,
            "protocol": self.config.protocol or "none",
            "drawn by": self.simulator.get("driver") or "not known",
            "reset seeds": seeds,
            "interval": f"Wilson score, {CONFIDENCE_TEXT}",
            "seconds in simulators and policy": round(result.env_s + result.policy_s, 1),
            "command": process["command"],
            "directory": process["directory"],
            "embodrl": process["embodrl"] + (f", commit {process['commit'][:12]}" if process["commit"] else ""),
            "computed": compute_text(self.config),
            "host": f"{process['host']}, {process['platform']}, Python {process['python']}",
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        }

    def _sampling(self) -> dict[str, object]:
        """Return the settings that affect sampled and mean tokens."""
        if MODELS.entry(self.config.model.model_type).kind not in ("tokens", "sequence", "text"):
            return {}
        sampling = self.config.algorithm.sampling
        return {"sampling": f"temperature {sampling.temperature:g}, top_k {sampling.top_k}"}

    def write(self, result: EvalResult) -> list[str]:
        """Write all files and return lines for the console; failing to write the page only logs a warning.

        Raises:
            OutputError: eval.json can't be written.
        """
        content = self.content(result)
        write_json_file(self.directory / JSON_FILE, content)
        videos = sorted(self.video_dir.glob("[!.]*.mp4")) if self.video_dir is not None else []
        written = self._write_page(content, result, videos)
        lines = (
            [
                _line(f"success rate ({result.decoding})", content["interval"], result.episodes, result.success_rate),
                *_at_end(result),
                *_at_first(result, self.config),
            ]
            if result.episodes
            else ["no episode was completed"]
        )
        lines += [_changed(f"success rate ({name})", content["decodings"][name]) for name in result.decodings]
        if 1 < len(content["tasks"]) <= MAX_LINES:
            lines += [
                f"  {_line(task, row['interval'], row['episodes'], row['success_rate'])}"
                for task, row in content["tasks"].items()
            ]
        lines += [f"  {_changed(name, row)}" for name, row in content["axes"].items()]
        if self.video_dir is not None:
            wanted = sum(record.number < self.config.env.video.num_episodes for record in result.records)
            lines += [f"videos: only {len(videos)} of {wanted} could be written"] * (len(videos) < wanted)
        return [*lines, *written]

    def _write_page(self, content: EvalContent, result: EvalResult, videos: list[Path]) -> list[str]:
        """Write the video grid and the page as far as possible; return the line that names the page."""
        again = str(content["settings"]["command"])
        grid = None
        again += " --output NEW_DIRECTORY" * again.startswith("embodrl ")
        with afterwards(GRID_FILE, again):
            grid = self._grid(result, videos)
        with afterwards(HTML_FILE, again):
            title = f"{self.config.env.env_type}, {self.config.model.model_type}: evaluation"
            page = eval_page(content, title, self.directory, grid, videos)
            write_text_file(self.directory / HTML_FILE, page)
            return [f"report: {self.directory / HTML_FILE}"]
        return []

    def _grid(self, result: EvalResult, videos: list[Path]) -> Path | None:
        """Write the grid of the videos, which are named ``episode_<number>_<outcome>.mp4``."""
        records = {record.number: record for record in result.records}
        filmed = [(records.get(int(path.stem.split("_")[1])), path) for path in videos]
        tiles = [
            Tile(path, f"{record.number}  {record.task}: {record.instruction}", record.success)
            for record, path in filmed
            if record is not None
        ]
        if not tiles:
            return None
        write_grid(tiles, self.directory / GRID_FILE)
        return self.directory / GRID_FILE


def _task(records: list[EpisodeRecord]) -> TaskFigures:
    solved = sum(record.success for record in records)
    return {
        "success_rate": solved / len(records),
        "interval": wilson_interval(solved, len(records)),
        "successes": solved,
        "episodes": len(records),
        "instruction": records[0].instruction,
    }


def _agent(*figures: float) -> AgentFigures:
    success, mean_return, length = (None if math.isnan(figure) else figure for figure in figures)
    return {"success_rate": success, "mean_return": mean_return, "mean_length": length}


def _other(first: EvalResult, other: EvalResult) -> OtherFigures:
    solved = sum(other.successes)
    return {
        "success_rate": other.success_rate if other.episodes else None,
        "interval": wilson_interval(solved, other.episodes),
        "successes": solved,
        "episodes": other.episodes,
        "lost_episodes": other.lost_episodes,
        "change": compare_pairs(_outcomes(first), _outcomes(other)),
        "per_episode": [EpisodeFigures(**vars(record)) for record in other.records],
    }


def _outcomes(result: EvalResult) -> dict[int, bool]:
    return {record.number: record.success for record in result.records}


def _line(name: str, interval: tuple[float, float], episodes: int, rate: float) -> str:
    low, high = interval
    shown = f"{CONFIDENCE_TEXT} interval {100 * low:.1f} to {100 * high:.1f} %"
    return f"{name} {100 * rate:.1f} % of {episodes} episodes ({shown})"


def _changed(name: str, row: OtherFigures) -> str:
    if row["success_rate"] is None:
        return f"{name}: no episode was completed"
    return f"{_line(name, row['interval'], row['episodes'], row['success_rate'])}, {change_text(row['change'])}"


def _at_end(result: EvalResult) -> list[str]:
    """Return a line if fewer episodes ended solved than were solved at some time."""
    differs = result.success_at_end < result.success_rate
    return [f"solved at the end {100 * result.success_at_end:.1f} %"] if differs else []


def _at_first(result: EvalResult, config: Config) -> list[str]:
    """Return a line if episodes were solved before a policy could act; a message may solve one at once."""
    writes = MODELS.entry(config.model.model_type).kind == "text"
    found = 0 if writes else result.solved_at_first_step
    text = f"{found} of {result.episodes} episodes were solved at their first step: does the environment start solved?"
    return [text] if found else []


def weights_hash(policy: nn.Module) -> str:
    """Return the SHA-256 over a policy's weights: names, dtypes, shapes and bytes, ordered by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
