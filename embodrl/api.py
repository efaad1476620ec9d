"""Functions of the verbs, as exported by ``import embodrl`` along with types and registries."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from embodrl.config.load import LoadedConfig
from embodrl.errors import ConfigError, ConfigProblem, EmbodrlError
from embodrl.fields import read_regular_file
from embodrl.pipelines.load import load_config as _load_config
from embodrl.reporting.metrics_file import MAX_BYTES

if TYPE_CHECKING:
    from embodrl.config.schema.readers import Verb
    from embodrl.models.base import VLAPolicy
    from embodrl.runs.collect import CollectResult
    from embodrl.runs.eval_result import EvaluationResult
    from embodrl.runs.train import TrainResult

ConfigLike = LoadedConfig | Mapping[str, Any] | Sequence[str] | str | Path | None
"""Overrides (``["env=toy", "runner.seed=3"]``), a mapping, the path of a YAML file, or a loaded configuration."""


def __getattr__(name: str) -> Any:
    # Results are defined next to the verbs, which import torch.
    modules = {"TrainResult": "train", "EvaluationResult": "eval_result", "CollectResult": "collect"}
    if name not in modules:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"embodrl.runs.{modules[name]}"), name)


P = ParamSpec("P")
R = TypeVar("R")


def _explain_keywords(verb: Callable[P, R]) -> Callable[P, R]:
    """Report settings passed as keyword arguments, with the correct form."""
    known = inspect.signature(verb).parameters

    @functools.wraps(verb)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = {name: value for name, value in kwargs.items() if name not in known}
        if unknown:
            settings = ", ".join(f'"{name}={value}"' for name, value in unknown.items())
            hint = f'write embodrl.{verb.__name__}([{settings}]), with single values as "section.key=VALUE"'
            message = f"settings are not keyword arguments of {verb.__name__}()"
            problem = ConfigProblem(next(iter(unknown)), message, hint=hint, code="settings-as-keywords")
            raise ConfigError([problem])
        return verb(*args, **kwargs)

    return called


@dataclass(frozen=True)
class SftResult:
    """Result of supervised fine-tuning.

    Attributes:
        output_dir: directory of metrics and ``policy/``.
        exit_code: 0 if finished, 128 + N if stopped by signal N, with the policy so far saved.
    """

    output_dir: Path
    exit_code: int

    @property
    def policy_dir(self) -> Path:
        """Policy directory in its public layout, for ``load_policy`` or ``model.warm_start``."""
        return self.output_dir / "policy"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary per logged step."""
        for name in ("metrics.jsonl", "sft_metrics.jsonl"):
            if (path := self.output_dir / name).is_file():
                return [json.loads(line) for line in read_regular_file(path, MAX_BYTES).splitlines()]
        return []


@_explain_keywords
def load_config(config: ConfigLike = None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Compose presets, a mapping or YAML file, and overrides, and validate the result.

    Args:
        config: overrides, a mapping (``{"env": "toy", "runner": {"seed": 3}}``; a group with a name as value chooses a
            preset), the path of a YAML file, or None for the defaults.
        overrides: further overrides as on the command line, e.g. ``env=toy`` or ``runner.seed=3``; they take
            precedence.

    Returns:
        The configuration: typed values in ``config``, their ``origins``, and ``notes`` about surprising settings.

    Raises:
        ConfigError: the configuration is invalid; lists every problem found.
    """
    return _load(config, overrides)


@_explain_keywords
def train(config: ConfigLike = None, overrides: Sequence[str] = ()) -> TrainResult:
    """Train a policy in a new run directory, like `embodrl train`.

    Ctrl-C stops the run with a checkpoint (``exit_code`` 130): a rollout is dropped and repeated by `embodrl resume`,
    an update is finished first. Work that makes no progress for ``runner.stop_timeout_s`` is interrupted without
    saving, by an EmbodrlError with code ``stopped-unsaved``; a second Ctrl-C raises KeyboardInterrupt. The process
    itself is never ended. Signal handlers, torch's thread count, determinism and random state are restored on return.

    Args:
        config: as for ``load_config``.
        overrides: as for ``load_config``.

    Returns:
        ``metrics`` (a list of rows), ``run_dir``, ``policy``, ``videos`` and ``exit_code``.

    Raises:
        EmbodrlError: the configuration is invalid, a requirement is missing, or the run failed.
    """
    loaded = configured(config, overrides, "train")
    from embodrl.runs.train import train as run

    with torch_settings():
        return run(loaded)


@_explain_keywords
def evaluate(
    config: ConfigLike = None,
    overrides: Sequence[str] = (),
    *,
    policy: VLAPolicy | str | Path | None = None,
    output_dir: str | Path | None = None,
    trust: bool = False,
) -> EvaluationResult:
    """Evaluate a policy on fixed seeds, like `embodrl eval`.

    Args:
        config: as for ``load_config``; None with a run's policy uses the run's configuration.
        overrides: as for ``load_config``.
        policy: a policy, or the path of a run, a checkpoint or a policy directory; None uses the configured one.
        output_dir: new or empty directory; None creates one in the run's directory or outputs/.
        trust: let the settings of a run that another user started run code.

    Returns:
        ``success_rate`` with its 95 % ``interval``, a record per episode in ``episodes``, ``report`` and ``videos``.

    Raises:
        EmbodrlError: the configuration is invalid, a requirement is missing, or the simulator failed.
    """
    from embodrl.runs.evaluate import evaluate as run
    from embodrl.runs.policies import find_policy
    from embodrl.workers.policy import build_policy

    make = build_policy
    if isinstance(policy, (str, Path)):
        source = find_policy(Path(policy))
        make = source.make_policy
        if config is None:
            config = source.load_config(list(overrides), trust)
            overrides = ()
        else:
            chosen = _load(config, overrides, "eval")
            if source.policy_dir is not None:
                section = {"warm_start": str(source.policy_dir), "model_path": None, "lora_path": None}
                model = chosen.config.model.model_copy(update=section)
                chosen = chosen.with_config(chosen.config.model_copy(update={"model": model}))
            config = chosen
            overrides = ()
    elif policy is not None:
        given = policy
        make = lambda _: given  # noqa: E731
    loaded = configured(config, overrides, "eval")
    with torch_settings():
        return run(loaded, output_dir=Path(output_dir) if output_dir else None, make_policy=make)


@_explain_keywords
def collect(
    config: ConfigLike = None,
    overrides: Sequence[str] = (),
    *,
    policy: VLAPolicy | str | Path | None = None,
    trust: bool = False,
) -> CollectResult:
    """Collect demonstrations by scripted experts, or by a policy, like `embodrl collect`.

    Args:
        config: as for ``load_config``; None with a run's policy uses the run's configuration.
        overrides: as for ``load_config``, e.g. ``collect.num_episodes=50``.
        policy: policy that acts instead of the experts, or the path of a run, a checkpoint or a policy directory.
        trust: let the settings of a run that another user started run code.

    Returns:
        ``output_dir``, ``num_episodes``, ``num_frames`` and the ``success_rate`` by task.

    Raises:
        EmbodrlError: the configuration is invalid, a requirement is missing, or the experts or the simulator failed.
    """
    from embodrl.runs.collect import collect as run
    from embodrl.runs.policies import find_policy
    from embodrl.workers.parts import acting_policy

    if policy is None:
        loaded = configured(config, overrides, "collect")
        return run(loaded.config, loaded.deployment)
    make: Callable[..., VLAPolicy]
    if isinstance(policy, (str, Path)):
        source = find_policy(Path(policy))
        chosen = source.load_config(list(overrides), trust, "record") if config is None else None
        make = source.make_policy
        more = source.arguments([])
    else:
        given = policy
        chosen = None
        more = list[str]()
        make = _always(given)
    loaded = _measured(chosen or _load(config, [*more, *overrides], "record"))
    if not isinstance(policy, (str, Path)) and loaded.deployment.rolls_out_in_processes:
        raise EmbodrlError(
            "a policy object acts in this process, and the configuration places rollouts in others",
            "pass the directory of the policy, or leave rollout.own_process and several rollout places out",
            code="policy-in-processes",
        )
    with torch_settings():
        acting = acting_policy(loaded, str(policy) if isinstance(policy, (str, Path)) else "a policy", make)
        return run(loaded.config, loaded.deployment, acting)


def _always(policy: VLAPolicy) -> Callable[..., VLAPolicy]:
    return lambda *_: policy


@_explain_keywords
def sft(config: ConfigLike = None, overrides: Sequence[str] = ()) -> SftResult:
    """Fine-tune a policy on demonstrations, like `embodrl sft`.

    Args:
        config: as for ``load_config``.
        overrides: as for ``load_config``, e.g. ``sft.data_dir=data/push``.

    Raises:
        EmbodrlError: the configuration is invalid, there are no demonstrations, or the loss is not finite.
    """
    loaded = _load(config, overrides, "sft")
    if loaded.config.sft.eval_interval:
        loaded = _measured(loaded)
    from embodrl.runs.sft import sft as run

    with torch_settings():
        return SftResult(Path(loaded.config.sft.output_dir), run(loaded))


def load_policy(
    path: str | Path, device: str = "auto", overrides: Sequence[str] = (), *, trust: bool = False
) -> VLAPolicy:
    """Load a trained policy for inference.

    >>> policy = embodrl.load_policy("outputs/my-run")                      # doctest: +SKIP
    >>> actions = policy.predict(image, "push the cube to the target")     # doctest: +SKIP

    Args:
        path: a run, ``RUN/checkpoints/step_N``, or a policy directory, e.g. ``RUN/policy``.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        overrides: overrides of the run's configuration; for a policy outside of a run, the configuration of its
            training, e.g. ``["model=pi0", "model.num_action_chunks=8"]``.
        trust: let the settings of a run that another user started run code.

    Returns:
        The policy in evaluation mode; see ``VLAPolicy.predict``.

    Raises:
        EmbodrlError: there is no policy, or it does not match the configuration.
    """
    import torch

    from embodrl.runs.policies import find_policy

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    source = find_policy(Path(path))
    return source.make_policy(source.load_config(list(overrides), trust, "serve").config, torch.device(device))


def follow_weights(
    run_dir: str | Path, versions: int | None = None, wait_s: float = 600.0, trust: bool = False
) -> Iterator[tuple[int, EvaluationResult]]:
    """Evaluate every new version of the weights that a run publishes (``rollout.publish_weights=true``).

    The run may be on another machine that shares its directory. Versions superseded during an evaluation are skipped;
    one that a resumed run has written again comes again.

    Args:
        run_dir: run directory.
        versions: stop after this many versions; None: never.
        wait_s: stop when no new version appears for this many seconds.
        trust: let the settings of a run that another user started run code.

    Yields:
        The version, i.e. the number of updates that the weights have seen, and its evaluation.

    Raises:
        EmbodrlError: this is not a run, or its weights do not match.
    """
    from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
    from embodrl.hybrid_engines.weight_sync.buckets import layout_of
    from embodrl.hybrid_engines.weight_sync.disk import DiskReceiver
    from embodrl.runs.eval_result import evaluation_of
    from embodrl.trainer.settings import load_saved
    from embodrl.workers.env import make_pool
    from embodrl.workers.policy import build_policy, configure_torch, num_threads
    from embodrl.workers.rollout_backend import evaluator_class

    run_dir = Path(run_dir)
    loaded, _ = load_saved(run_dir, [], "eval", resuming=True, trust=trust)
    config = loaded.config
    with torch_settings():
        configure_torch(config, loaded.deployment.of("rollout")[0])
        policy = build_policy(config)
        engine = NativeRolloutEngine(policy, config.rollout, config.algorithm.sampling, 0, num_threads(config))
        receiver = DiskReceiver(engine, run_dir / "weights", layout_of(policy))
        try:
            with make_pool(config.evaluated, config.env.eval.total_num_envs, run_dir / "follow_logs") as pool:
                evaluator = evaluator_class(config)(config, pool, engine)
                done = 0
                while versions is None or done < versions:
                    report = receiver.receive(timeout_s=wait_s)
                    if report is None:
                        return
                    yield report.version, evaluation_of(evaluator.run())
                    done += 1
        finally:
            receiver.close()


def configured(config: ConfigLike, overrides: Sequence[str], verb: Verb) -> LoadedConfig:
    """Return the configuration of a verb that starts simulators; see ``load_config``."""
    loaded = _measured(_load(config, overrides, verb))
    if verb != "train":
        return loaded
    from embodrl.preflight.placement import weighed

    return weighed(loaded)


def _load(config: ConfigLike, overrides: Sequence[str], verb: Verb | None = None) -> LoadedConfig:
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(config, LoadedConfig):
        if overrides:
            raise EmbodrlError(
                "overrides can't be applied to a loaded configuration",
                "pass them to load_config, or pass the YAML file or mapping itself",
                code="overrides-after-loading",
            )
        return config
    if config is None or isinstance(config, (str, Path, Mapping)):
        source = Path(config) if isinstance(config, str) else config
        return _load_config(list(overrides), source, verb)
    return _load_config([*config, *overrides], None, verb)


def _measured(loaded: LoadedConfig) -> LoadedConfig:
    """Measure ``env.num_processes: auto`` on this machine, unless this was done before."""
    if loaded.processes is None or loaded.processes.measured:
        return loaded
    import logging

    from embodrl.runs.measure import measure_processes

    return loaded.with_processes(measure_processes(loaded.config, loaded.processes, logging.getLogger(__name__).info))


@contextmanager
def torch_settings() -> Iterator[None]:
    """Restore torch's process-wide settings on exit, e.g. for a notebook."""
    import torch

    threads = torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()
    deterministic = cast(Any, torch.utils.deterministic)
    fill = deterministic.fill_uninitialized_memory
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fill
