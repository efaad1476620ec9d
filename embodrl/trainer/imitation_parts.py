"""The composition root of imitation runs: `embodrl sft` and `embodrl store train`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from embodrl.config.schema import Config
from embodrl.errors import OutputError
from embodrl.hybrid_engines.base import TrainEngine
from embodrl.learners.imitation import VAL_LOSS, HeldOut, ImitationHooks, engine_config
from embodrl.models.base import IMITATION, VLAPolicy, require
from embodrl.reporting.metrics_file import Row
from embodrl.reporting.progress import Progress
from embodrl.reporting.rows import is_number, other_rates
from embodrl.reporting.sinks import MetricValue
from embodrl.trainer.files import POLICY_DIR, check_disk_space, export_policy, versions_num_bytes
from embodrl.trainer.loop import Trainer
from embodrl.trainer.parts import start_engine
from embodrl.trainer.session import RunSession
from embodrl.workers.env import check_simulator, make_pool
from embodrl.workers.evaluator import Evaluator, run_decodings
from embodrl.workers.parts import make_acting
from embodrl.workers.policy import check_policy_decoding, configure_torch


def prepare_imitation(session: RunSession) -> None:
    """Set up torch, and reject evaluations that cannot run, before anything starts."""
    configure_torch(session.config, session.deployment.of("actor")[0])
    if session.config.sft.eval_interval:
        check_simulator(session.config)


def start_imitation(
    session: RunSession, built_from: Config, policy: VLAPolicy, closing: ExitStack, published: int = 0
) -> TrainEngine:
    """Return the engine of an imitation run, after checking the disk space.

    Args:
        session: attempt at the run.
        built_from: configuration that the policy was built from.
        policy: this process's policy.
        closing: parts to close, in reverse order.
        published: number of directories of published weights.

    Raises:
        OutputError: the disk has too little space.
        EmbodrlError: the policy does not support imitation, or lacks the decoding of evaluations, or a training process
            could not be started.
    """
    config = session.config
    require(policy, IMITATION)
    check_policy_decoding(config, policy, config.env.eval.decoding_of(every=False))
    engine = session.engine = start_engine(session, engine_config(built_from, policy.device), policy, closing)
    is_evaluated = config.sft.eval_interval > 0
    sent = (published + (config.runner.eval_async and is_evaluated)) * versions_num_bytes(policy)
    keeps_best = config.runner.keep_best and is_evaluated
    with names_output():
        check_disk_space(session.directory, config, policy, engine.shapes().num_bytes, keep_best=keeps_best, sent=sent)
    session.stop.arm()
    return engine


@contextmanager
def names_output() -> Iterator[None]:
    """Name the setting of the output directory in errors of the block."""
    try:
        yield
    except OutputError as error:
        hint = "set sft.output_dir to a writable directory with free space"
        raise OutputError(error.message, hint, code=error.code) from error


def make_hooks(
    session: RunSession, policy: VLAPolicy, progress: Progress, validate: HeldOut | None = None
) -> ImitationHooks:
    """Return a learner's hooks; the simulators run only during evaluations.

    ``validate`` measures held-out demonstrations; None without any.
    """
    config = session.config
    shown = dict[str, float]()

    def should_stop() -> bool:
        return bool(session.stop)

    def on_step(step: int, row: Mapping[str, float]) -> None:
        shown.update(row)  # the held-out loss remains valid until it is measured again
        progress.update(step, step_text(shown))

    def play(video_dir: Path | None, every_decoding: bool) -> Row:
        acting = make_acting(config, policy)
        with make_pool(config.evaluated, config.env.eval.total_num_envs) as pool:
            decodings = run_decodings(config, acting, every_decoding)
            evaluator = Evaluator(config, pool, acting, should_stop, decodings=decodings)
            with progress.within("evaluation", evaluator.num_plays, "episodes") as shown:
                return evaluator.run(video_dir, shown.update).metrics()

    return ImitationHooks(play, on_step, should_stop, validate)


def step_text(row: Mapping[str, float]) -> str:
    """Return the metrics of a step for the progress line: the loss, the held-out loss, then the others."""
    first = [name for name in ("loss", VAL_LOSS) if name in row]
    names = [*first, *(name for name in row if name not in (*first, "lr")), *(["lr"] if "lr" in row else [])]
    titles = {VAL_LOSS: "held-out loss"}
    return " ".join(
        f"{titles.get(name, name)} {f'{row[name]:.1e}' if name == 'lr' else f'{row[name]:.3f}'}" for name in names
    )


def run_and_export(trainer: Trainer, progress: Progress) -> int:
    """Train to the end or a signal, and export the policy; return the exit code."""
    session = trainer.session
    code = trainer.run(session.record(trainer.iteration, progress.message))
    session.lock.check()
    with session.stop.saving():
        trainer.learner.engine.fetch()
        export_policy(trainer.learner.policy, session.directory / POLICY_DIR, session.config)
    return code


class ImitationView:
    """A progress bar of steps, with lines for evaluations and checkpoints."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def phase(self, text: str, chunks: int = 0) -> None:
        """Do nothing: the bar shows the progress."""

    def restore(self, rows: list[Row]) -> None:
        """Do nothing: the bar shows the progress of earlier processes."""

    def update(self, row: Mapping[str, MetricValue]) -> None:
        """Show an evaluation."""
        rate = row.get("eval/success_rate")
        if is_number(rate):
            others = "".join(f", {name} {other:.1%}" for name, other in other_rates(row).items())
            self._progress.message(f"step {row['iteration']}: success rate {rate:.1%}{others}")

    def late(self, row: Mapping[str, MetricValue]) -> None:
        """Show an evaluation that ran in parallel with training."""
        self.update(row)

    def message(self, text: str) -> None:
        """Show a permanent line."""
        self._progress.message(text)
