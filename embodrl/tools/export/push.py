"""`embodrl export --push`: an exported policy on the Hugging Face hub, with a model card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from embodrl.config.schema import Config
from embodrl.config.yaml_text import to_yaml
from embodrl.errors import HubError, UsageError
from embodrl.fields import MAX_JSON_BYTES, Fields, read_fields, read_regular_file
from embodrl.hub import HubName, explained, parse
from embodrl.pipelines.select import algorithm_name
from embodrl.reporting.metrics_file import METRICS_FILE
from embodrl.runs.eval_output import JSON_FILE, VIDEO_DIR
from embodrl.runs.sft import METRICS_FILE as SFT_METRICS
from embodrl.runs.sft import is_sft_run
from embodrl.storage.checkpoint import Checkpoint
from embodrl.trainer.files import base_of
from embodrl.version import __version__

CARD = "README.md"
CONFIG = "training/config.yaml"
METRICS = "training/metrics.jsonl"
MAX_METRICS_BYTES = 2**26
MAX_VIDEOS = 12
MAX_VIDEO_BYTES = 2**26
PUBLIC_HINT = "add --public to publish it, or push to another name"


def check_push(repository: str, public: bool) -> HubName:
    """Return the repository to push to; fails before anything is exported.

    Raises:
        UsageError: the name is not ``OWNER/NAME``.
        HubError: no login, the hub can't be reached, or the repository is public and ``public`` is not set.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    name = parse(f"hf://{repository.removeprefix('hf://')}")
    if name is None or name.revision is not None or name.kind != "model":
        raise UsageError(f"--push {repository}: not the name of a model", "give OWNER/NAME", code="hub-name")
    if get_token() is None:
        problem = "pushing to the hub needs a login"
        raise HubError(problem, "log in with `hf auth login`, or set HF_TOKEN", code="hub-access")
    with explained(name):
        try:
            found = HfApi(library_name="embodrl").model_info(name.repository)
        except RepositoryNotFoundError:
            return name
    if not found.private and not public:
        raise HubError(f"{name} is on the hub and public", PUBLIC_HINT, code="hub-public")
    return name


def push(name: HubName, policy: Path, checkpoint: Checkpoint, config: Config, public: bool, licence: str) -> str:
    """Upload a policy with its card, the run's configuration and metrics, and its newest evaluation with videos.

    Uses the login of the hub's own tools; a token is neither read from settings nor written anywhere.

    Args:
        name: result of ``check_push``; a new repository is private unless ``public``.
        policy: exported directory.
        checkpoint: checkpoint of a run that it was exported from.
        config: configuration of the run.
        public: make a new repository public.
        licence: license identifier of the hub.

    Returns:
        URL of the commit.

    Raises:
        HubError: the hub refuses, or can't be reached; at most an empty repository is then visible.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    files: dict[str, Path | bytes] = {
        path.relative_to(policy).as_posix(): path for path in sorted(policy.rglob("*")) if path.is_file()
    }
    run_dir = checkpoint.path.parent.parent
    files |= dict(_records(run_dir, config))
    evaluation = _evaluation(run_dir)
    how = f"`{algorithm_name(config)}`, iteration {checkpoint.step}"
    if is_sft_run(run_dir):
        how = f"fine-tuning on demonstrations (`embodrl sft`), step {checkpoint.step}"
    files[CARD] = _card(name, config, how, licence, evaluation, list(files)).encode()
    api = HfApi(library_name="embodrl")
    operations = [CommitOperationAdd(path, content) for path, content in files.items()]
    with explained(name):
        api.create_repo(name.repository, private=not public, exist_ok=True)
        try:
            return api.create_commit(
                name.repository, operations, commit_message=f"Policy of step {checkpoint.step}"
            ).commit_url
        except (RuntimeError, ValueError) as error:
            if isinstance(error, OSError):  # a response of the hub, which is explained
                raise
            cause = type(error.__cause__ or error).__name__
            problem = f"{name}: a file could not be uploaded ({cause})"
            raise HubError(problem, "run the command again: uploaded files are kept", code="hub-unreachable") from error


def _records(run_dir: Path, config: Config) -> Iterator[tuple[str, Path | bytes]]:
    yield CONFIG, _without_home(to_yaml(config, None)).encode()
    metrics = run_dir / (SFT_METRICS if is_sft_run(run_dir) else METRICS_FILE)
    if metrics.is_file():
        yield METRICS, read_regular_file(metrics, MAX_METRICS_BYTES)
    newest = max(run_dir.glob(f"eval-*/{JSON_FILE}"), default=None)
    videos = sorted(run_dir.glob("videos/iteration_*")) if newest is None else [newest.parent / VIDEO_DIR]
    if newest is not None:
        yield JSON_FILE, _without_home(read_regular_file(newest, MAX_JSON_BYTES).decode()).encode()
    for video in sorted(videos[-1].glob("[!.]*.mp4"))[:MAX_VIDEOS] if videos else []:
        if video.is_file() and not video.is_symlink() and video.stat().st_size <= MAX_VIDEO_BYTES:
            yield f"{VIDEO_DIR}/{video.name}", video


def _evaluation(run_dir: Path) -> Fields | None:
    newest = max(run_dir.glob(f"eval-*/{JSON_FILE}"), default=None)
    return None if newest is None else read_fields(newest, follow_links=False)


def _without_home(text: str) -> str:
    return text.replace(str(Path.home()), "~")


def _card(name: HubName, config: Config, how: str, licence: str, evaluation: Fields | None, files: list[str]) -> str:
    """Return the card: YAML for the hub, and a text."""
    from huggingface_hub import EvalResult, ModelCardData

    env = config.env
    model = config.model
    base = parse(base_of(config) or "")
    rate = None if evaluation is None else evaluation.number("success_rate", None)
    results = None
    if rate is not None:
        results = [EvalResult("robotics", env.env_type, ", ".join(env.tasks), "success_rate", rate)]
    adapters = "adapter_config.json" in files
    data = ModelCardData(
        license=licence,
        base_model=None if base is None else base.repository,
        library_name="peft" if adapters else "embodrl",
        pipeline_tag="robotics",
        tags=["robotics", "reinforcement-learning", "vision-language-action", model.model_type],
        model_name=name.repository.partition("/")[2],
        eval_results=results,
    )
    rows = {
        "family": f"`{model.model_type}`",
        "base model": "random weights" if base_of(config) is None else f"`{_without_home(str(base_of(config)))}`",
        "environment": f"`{env.env_type}`: {', '.join(env.tasks)}",
        "training": f"{how}, seed {config.runner.seed}",
        "embodrl": __version__,
    }
    if evaluation is not None and rate is not None:
        low, high = evaluation.numbers("interval")
        episodes = evaluation.integer("episodes")
        rows["success"] = f"{100 * rate:.1f} % of {episodes} episodes (95 %: {100 * low:.1f} to {100 * high:.1f} %)"
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    setting = "model.lora_path" if adapters else "model.model_path"
    use = f"embodrl eval env={env.env_type} model={model.model_type} {setting}={name.repository}"
    records = {CONFIG: "configuration", METRICS: "metrics of training", JSON_FILE: "evaluation"}
    listed = "".join(f"- `{path}`: {what}\n" for path, what in records.items() if path in files)
    videos = "".join(f"- [{path}]({path})\n" for path in files if path.startswith(VIDEO_DIR))
    return (
        f"---\n{data.to_yaml()}\n---\n\n# {name.repository}\n\nA policy trained with embodrl.\n\n"
        f"| | |\n|---|---|\n{table}\n\n```sh\n{use}\n```\n\n{listed}{videos}"
    )
