"""Evaluation of a policy on fixed seeds, with each decoding."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodrl.config.schema import Config
from embodrl.envs.pool.faults import forget_refused
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EnvError, EnvTimeout, EnvWorkerDied
from embodrl.hybrid_engines.rollout.base import RolloutEngine
from embodrl.models.base import check_decoding
from embodrl.types import Decoding, EnvSpec, Observation, PolicyOutput
from embodrl.workers.play import Play, PlayedChunk, Recorder, one_episode, take_turns

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Maximum number of runs of an episode that simulator faults end."""


@dataclass(frozen=True)
class EpisodeRecord:
    """One completed episode.

    Attributes:
        number: index i; the seed is ``env.eval.seed + i``.
        seed: reset seed.
        task: task name.
        instruction: task instruction.
        success: the task was solved at some step.
        success_at_end: the task was solved after the last step; None if the environment does not report it.
        episode_return: sum of rewards.
        length: environment steps.
    """

    number: int
    seed: int
    task: str
    instruction: str
    success: bool
    success_at_end: bool | None
    episode_return: float
    length: int


@dataclass
class EvalResult:
    """Figures of an evaluation.

    Attributes:
        success_rate: fraction of episodes that solved the task at some step; NaN without an episode.
        episodes: number of completed episodes; all figures refer to them.
        per_task: success rate of each task with a completed episode.
        mean_return: mean sum of rewards.
        mean_length: mean number of environment steps.
        env_s, policy_s: seconds spent waiting for simulation and for the policy.
        records: episodes in seed order.
        lost_episodes: number of runs of episodes that a simulator fault ended.
        first_pictures: task -> SHA-256 over the images of the first observation of its first episode.
        decoding: decoding of these figures.
        decodings: results on the same episodes with other decodings.
        per_agent: by agent of a workflow, over the episodes in which it acted, means of success, return and length.
    """

    success_rate: float
    episodes: int
    per_task: dict[str, float]
    mean_return: float
    mean_length: float
    env_s: float = 0.0
    policy_s: float = 0.0
    records: list[EpisodeRecord] = field(default_factory=list)
    lost_episodes: int = 0
    first_pictures: dict[str, str] = field(default_factory=dict)
    decoding: Decoding = "greedy"
    decodings: dict[Decoding, EvalResult] = field(default_factory=dict["Decoding", "EvalResult"])
    per_agent: dict[str, tuple[float, float, float]] = field(default_factory=dict[str, tuple[float, float, float]])

    @property
    def by_decoding(self) -> dict[Decoding, EvalResult]:
        """This result, then the results of the other decodings."""
        return {self.decoding: self, **self.decodings}

    @property
    def success_at_end(self) -> float:
        """Fraction of episodes that ended solved; NaN if unknown for some episode, or without episodes."""
        known = [record.success_at_end for record in self.records if record.success_at_end is not None]
        return float(np.mean(known)) if known and len(known) == len(self.records) else float("nan")

    @property
    def solved_at_first_step(self) -> int:
        """Number of episodes that ended solved after one step: most likely they started solved."""
        return sum(record.success and record.length <= 1 for record in self.records)

    @property
    def successes(self) -> list[bool]:
        """One value per episode, in seed order."""
        return [record.success for record in self.records]

    def metrics(self) -> dict[str, float]:
        """Return the entries for metrics.jsonl."""
        result = {
            "eval/success_rate": self.success_rate,
            "eval/return": self.mean_return,
            "eval/episode_length": self.mean_length,
            "eval/episodes": float(self.episodes),
            "eval/lost_episodes": float(self.lost_episodes),
            "time/eval_s": sum(one.env_s + one.policy_s for one in self.by_decoding.values()),
        }
        for decoding, one in self.by_decoding.items():
            if decoding != "greedy" or self.decoding != "greedy":
                result[f"eval/success_rate_{decoding}"] = one.success_rate
        if len(self.per_task) > 1:
            result |= {f"eval/{task}/success_rate": rate for task, rate in self.per_task.items()}
        for agent, figures in self.per_agent.items():
            names = ("success_rate", "return", "episode_length")
            result |= {f"eval/agent/{agent}/{name}": figure for name, figure in zip(names, figures, strict=True)}
        return result


@dataclass
class EpisodeResults:
    """Outcomes of some episodes.

    Attributes:
        outcome: ``float64[n,4]``: success, return, length, success at the end; NaN if a fault ended the episode, and
            for success at the end if the environment does not report it.
        pictures: SHA-256 over the images of the first observation, for the first episode of each task; else "".
        env_s, policy_s: seconds spent waiting for simulation and for the policy.
        agents: by agent of a workflow, ``float64[n,3]``: success, return, length; NaN where it did not act.
    """

    outcome: NDArray[np.float64]
    instructions: list[str]
    pictures: list[str]
    env_s: float = 0.0
    policy_s: float = 0.0
    agents: dict[str, NDArray[np.float64]] = field(default_factory=dict[str, NDArray[np.float64]])


Played = dict[Decoding, EpisodeResults]
"""Outcomes of the same episodes by decoding; the first decoding provides the main figures."""


def join_results(parts: Sequence[Played], seconds: Callable[[Iterable[float]], float]) -> Played:
    """Concatenate results of episode groups; ``seconds`` is ``max`` if they ran at the same time, else ``sum``."""
    return {decoding: _join([part[decoding] for part in parts], seconds) for decoding in parts[0]}


def _join(parts: Sequence[EpisodeResults], seconds: Callable[[Iterable[float]], float]) -> EpisodeResults:
    return EpisodeResults(
        np.concatenate([part.outcome for part in parts]),
        [text for part in parts for text in part.instructions],
        [text for part in parts for text in part.pictures],
        seconds(part.env_s for part in parts),
        seconds(part.policy_s for part in parts),
        {
            agent: np.concatenate([part.agents.get(agent, np.full((len(part.outcome), 3), np.nan)) for part in parts])
            for agent in dict.fromkeys(agent for part in parts for agent in part.agents)
        },
    )


def chosen_decodings(config: Config, engine: RolloutEngine) -> tuple[Decoding, ...]:
    """Return the decodings that ``env.eval.decoding`` selects.

    Raises:
        EmbodrlError: the engine lacks the named decoding.
    """
    wanted = config.env.eval.decoding
    if wanted == "all":
        return engine.decodings
    check_decoding(wanted, engine.decodings, config.model.model_type)
    return (wanted,)


def run_decodings(config: Config, engine: RolloutEngine, every: bool) -> tuple[Decoding, ...]:
    """Return the decodings of an evaluation within a run, ``every`` one or those on the way; both begin with the same.

    Raises:
        EmbodrlError: the engine lacks a named decoding.
    """
    chosen = chosen_decodings(config, engine)
    first = config.env.eval.decoding_of(every=False)
    if first == "all":
        return chosen
    check_decoding(first, chosen, config.model.model_type)
    return (first, *(other for other in chosen if other != first)) if every else (first,)


Choose = Callable[[Observation, NDArray[np.int64], int], PolicyOutput]
"""Chooses the chunk with a given number, for rows ``[B]`` of episodes ``int64[B]``."""


def chooser(engine: RolloutEngine, seed: int, decoding: Decoding) -> Choose:
    """Return the action chooser of one decoding, with its own random numbers; ``seed`` belongs to episode 0."""
    if decoding != "sampled":
        return lambda observation, episodes, number: engine.decide(observation, decoding)
    shared = engine.make_generators([seed])

    def choose(observation: Observation, episodes: NDArray[np.int64], number: int) -> PolicyOutput:
        by_row = engine.row_generators([(seed + int(episode), number) for episode in episodes])
        return engine.decide(observation, decoding, by_row or shared)

    return choose


EvalProgress = Callable[[int, str], None] | None
"""Called now and then with the number of finished episodes over all decodings, and a text."""


def _shifted(progress: Callable[[int, str], None], before: int) -> Callable[[int, str], None]:
    return lambda done, text: progress(before + done, text)


class Evaluator:
    """Runs ``env.eval.num_episodes`` episodes; episode i always has seed ``env.eval.seed + i`` and task ``i mod n``.

    Each decoding of ``env.eval.decoding`` plays the same episodes. If the policy samples by row, samples depend only on
    the episode and the chunk number, never on the engine's random state.

    Args:
        pool: any started pool; its environments are rebuilt before and after, so that evaluation and training do not
            affect each other.
        should_stop: called before every chunk; if it returns True, ``run`` raises InterruptedError.
        make_own: returns a pool, not started, for evaluations whose environments differ from ``pool``
            (``env.eval.tasks`` and the like); each evaluation starts and closes one.
        decodings: decodings to run, some of the engine's; None: as ``env.eval.decoding`` says.

    Raises:
        EmbodrlError: the engine lacks the decoding that ``env.eval.decoding`` names.
    """

    def __init__(
        self,
        config: Config,
        pool: EnvPool,
        engine: RolloutEngine,
        should_stop: Callable[[], bool] = lambda: False,
        make_own: Callable[[Config], EnvPool] | None = None,
        decodings: tuple[Decoding, ...] | None = None,
    ) -> None:
        self.config = config.evaluated
        # Without differences, evaluate in the training environments.
        self._make_own = None if self.config is config else make_own
        self.pool = pool
        self.engine = engine
        self.decodings = decodings or chosen_decodings(self.config, engine)
        self.should_stop = should_stop

    @property
    def num_plays(self) -> int:
        """Number of episodes over all decodings."""
        return self.config.env.eval.num_episodes * len(self.decodings)

    def run(
        self,
        video_dir: Path | None = None,
        progress: EvalProgress = None,
        decodings: tuple[Decoding, ...] | None = None,
    ) -> EvalResult:
        """Run all episodes; record videos of the first ones, with the first decoding, into ``video_dir``.

        ``decodings`` overrides the evaluator's.

        Raises:
            InterruptedError: ``should_stop`` returned True; the pool is back in the state of new environments.
        """
        episodes = np.arange(self.config.env.eval.num_episodes)
        return evaluation_result(self.config, self.run_episodes(episodes, video_dir, progress, decodings))

    def run_episodes(
        self,
        episodes: NDArray[np.int64],
        video_dir: Path | None = None,
        progress: EvalProgress = None,
        decodings: tuple[Decoding, ...] | None = None,
    ) -> Played:
        """Run the episodes ``int64[n]`` with each decoding, like ``run``.

        Raises:
            InterruptedError: as in ``run``.
            EnvError: the evaluation's own pool has other actions or observations than ``pool``.
        """
        if self._make_own is None:
            with self._drained():
                return self._play_all(episodes, video_dir, progress, decodings or self.decodings)
        training = self.pool
        with self._make_own(self.config) as self.pool:
            try:
                # Faults of the held-out pool count toward the run's total.
                self.pool.recovery.faults = training.faults
                _check_same(training.spec, self.pool.spec)
                with self._drained():
                    return self._play_all(episodes, video_dir, progress, decodings or self.decodings)
            finally:
                self.pool = training

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """Leave no request of the pool pending after a stop, which may come at any point."""
        try:
            yield
        except (SystemExit, KeyboardInterrupt):
            self.pool.requests.drain()
            raise

    def _play_all(
        self,
        episodes: NDArray[np.int64],
        video_dir: Path | None,
        progress: EvalProgress,
        decodings: tuple[Decoding, ...],
    ) -> Played:
        self.pool.call("rebuild", restart=True)
        # An interrupted evaluation returns to this mark (``rewind``), the state of new environments.
        self.pool.call("mark", restart=True)
        # Each wave resets its environments itself.
        self.pool.call("set_auto_reset", {"value": False}, restart=True)
        goes_on = self.config.env.eval.to_step_limit
        if goes_on:
            self.pool.call("set_ignore_terminations", {"value": True}, restart=True)
        played: Played = {}
        for decoding in decodings:
            if played:  # each decoding as if it were the only one
                self.pool.call("rebuild", restart=True)
            shown = None if progress is None else _shifted(progress, len(played) * len(episodes))
            played[decoding] = self._run_decoding(decoding, episodes, None if played else video_dir, shown)
        self.pool.call("set_auto_reset", {"value": self.config.env.train.auto_reset}, restart=True)
        if goes_on:
            value = self.config.env.train.ignore_terminations
            self.pool.call("set_ignore_terminations", {"value": value}, restart=True)
        self.pool.call("rebuild", restart=True)
        self.engine.offload()
        return played

    def _run_decoding(
        self, decoding: Decoding, episodes: NDArray[np.int64], video_dir: Path | None, progress: EvalProgress
    ) -> EpisodeResults:
        size = self.pool.spec.num_envs
        results = EpisodeResults(np.full((len(episodes), 4), np.nan), [""] * len(episodes), [""] * len(episodes))
        play = self._player(decoding)
        left = np.arange(len(episodes))
        for attempt in range(MAX_ATTEMPTS):
            if attempt and len(left):
                logger.warning("%d episodes came to no result, and are run again", len(left))
            for start in range(0, len(left), size):
                places = left[start : start + size]
                if attempt:
                    forget_refused(self.pool.managers)
                recorder = ResultRecorder(self.pool, results, places, episodes[places])
                if video_dir is not None:
                    recorder.film(video_dir, self.config.env.video.num_episodes)
                try:
                    play(episodes[places], recorder)
                except InterruptedError:
                    self.pool.call("rewind", restart=True)
                    raise
                if progress is not None:
                    done = int(np.count_nonzero(~np.isnan(results.outcome[:, 0])))
                    progress(done, f"{decoding}: success {_mean(results.outcome[:, 0]):.0%}")
            # Only episodes that a fault ended are NaN: a failed attempt counts.
            left = np.flatnonzero(np.isnan(results.outcome[:, 0]))
        return results

    def _player(self, decoding: Decoding) -> Callable[[NDArray[np.int64], ResultRecorder], None]:
        """Return a function that plays episodes ``int64[n]``, in the first n environments, with a decoding."""
        choose = chooser(self.engine, self.config.env.eval.seed, decoding)
        return lambda wave, recorder: self._play(wave, choose, recorder)

    def _play(self, wave: NDArray[np.int64], choose: Choose, recorder: ResultRecorder) -> None:
        """Run episodes ``wave int64[n]`` in the first n environments."""
        spec = self.pool.spec
        chunk = self.config.model.num_action_chunks

        def choose_all(observation: Observation, active: NDArray[np.bool_], number: int) -> PolicyOutput:
            rows = np.flatnonzero(active)
            output = choose(observation.select(rows), wave[rows], number)
            actions = np.zeros((spec.num_envs, chunk, spec.action_dim), np.float32)
            actions[rows] = output.actions
            return replace(output, actions=actions)

        play = Play(self.pool, choose_all, [recorder], one_episode(np.arange(len(wave))))
        # The last wave may be short; all environments are reset, since a pool tracks the state of every row.
        padded = np.pad(wave, (0, spec.num_envs - len(wave)), mode="edge")
        play.begin(self.config.env.eval.seed + padded, (padded % len(spec.tasks)).astype(np.int32))
        take_turns([play], self.should_stop)
        recorder.results.env_s += play.seconds.env
        recorder.results.policy_s += play.seconds.policy


class ResultRecorder(Recorder):
    """Keeps the outcomes of episodes ``wave int64[n]`` at ``places int64[n]`` of ``results``, and records videos.

    Attributes:
        videos: paths without ending, by row.
    """

    def __init__(
        self, pool: EnvPool, results: EpisodeResults, places: NDArray[np.int64], wave: NDArray[np.int64]
    ) -> None:
        self.pool = pool
        self.results = results
        self.places = places
        self.wave = wave
        self.videos: dict[int, Path] = {}

    def film(self, directory: Path, num_episodes: int) -> None:
        """Record videos of the episodes with the first numbers."""
        for row in np.flatnonzero(self.wave < num_episodes).tolist():
            self.videos[row] = directory.resolve() / f"episode_{self.wave[row]:03d}"

    def begin(self, seeds: NDArray[np.int64], observation: Observation) -> None:
        for row in range(len(self.places)):
            self.note_first(row, observation.select(np.array([row])))
        size = self.pool.spec.num_envs // len(self.pool.managers)
        for row, path in self.videos.items():
            with suppress(EnvWorkerDied, EnvTimeout):  # the next step notices the loss, and counts its episodes as lost
                self.pool.call_one(row // size, "start_video", {"row": row % size, "path": str(path)})

    def note_first(self, row: int, observation: Observation) -> None:
        """Keep what the first observation of an episode, a batch of one, says of it."""
        place = self.places[row]
        self.results.instructions[place] = observation.instruction[0]
        # Episode i has task i mod n, so the first n episodes show each task once.
        if self.wave[row] < len(self.pool.spec.tasks):
            self.results.pictures[place] = hashlib.sha256(observation.images[0].tobytes()).hexdigest()

    def after(self, chunk: PlayedChunk) -> None:
        step = chunk.step
        ended = np.flatnonzero(chunk.ended)
        asked = ended[step.success[ended] & ~step.terminated[ended].any(axis=1)]
        at_end = self.solved_at_end(step.success, asked)
        for row in ended:
            self.keep(int(row), (step.success[row], step.episode_return[row], step.episode_length[row], at_end[row]))

    def keep(self, row: int, found: tuple[float, float, float, float]) -> None:
        """Keep the outcome of an episode; see ``EpisodeResults``."""
        self.results.outcome[self.places[row]] = found

    def solved_at_end(self, success: NDArray[np.bool_], asked: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return ``float64[B]``: whether an episode ended solved; NaN if the environment does not report it.

        Only episodes ``asked``, that continued after a success, need a query.
        """
        at_end = success.astype(np.float64)
        if len(asked):
            at_end[asked] = np.nan
            with suppress(EnvWorkerDied, EnvTimeout):  # the next step notices the loss
                answers = [answer for answer in self.pool.call("solved_now") if isinstance(answer, np.ndarray)]
                if len(answers) == len(self.pool.managers):
                    at_end[asked] = np.concatenate(answers)[asked]
        return at_end


def _check_same(training: EnvSpec, held_out: EnvSpec) -> None:
    mine, theirs = ({**asdict(spec), "cameras": _sizes(spec)} for spec in (training, held_out))
    others = [name for name in mine if name not in ("num_envs", "tasks") and mine[name] != theirs[name]]
    if others:
        found = ", ".join(f"{name} ({theirs[name]} instead of {mine[name]})" for name in others)
        raise EnvError(
            f"the environments of env.eval differ from the training environments in {found}",
            "remove the setting in env.eval that changes them",
            code="evaluation-differs",
        )


def _sizes(spec: EnvSpec) -> list[tuple[int, int]]:
    return [(camera.height, camera.width) for camera in spec.cameras]


def evaluation_result(config: Config, played: Played) -> EvalResult:
    """Return the figures of an evaluation by decoding, from results in episode order."""
    first, *others = (_figures(config, decoding, results) for decoding, results in played.items())
    return replace(first, decodings={result.decoding: result for result in others})


def _figures(config: Config, decoding: Decoding, results: EpisodeResults) -> EvalResult:
    tasks = config.env.tasks
    outcome = results.outcome
    task_of = np.arange(len(results.outcome)) % len(tasks)
    numbers = np.flatnonzero(~np.isnan(outcome[:, 0]))
    if num_lost := len(outcome) - len(numbers):
        logger.warning(
            "%d of %d episodes came to no result in each of %d attempts, through faults or their workflow; they are not"
            " counted, and the remaining ones may be easier",
            num_lost,
            len(outcome),
            MAX_ATTEMPTS,
        )
    outcome = outcome[numbers]
    task_of = task_of[numbers]
    records = [
        EpisodeRecord(
            number=int(number),
            seed=config.env.eval.seed + int(number),
            task=tasks[int(task)],
            instruction=results.instructions[number],
            success=bool(row[0]),
            success_at_end=None if np.isnan(row[3]) else bool(row[3]),
            episode_return=float(row[1]),
            length=int(row[2]),
        )
        for number, task, row in zip(numbers, task_of, outcome, strict=True)
    ]
    return EvalResult(
        success_rate=_mean(outcome[:, 0]),
        episodes=len(outcome),
        per_task={name: _mean(outcome[task_of == i, 0]) for i, name in enumerate(tasks) if i in task_of},
        mean_return=_mean(outcome[:, 1]),
        mean_length=_mean(outcome[:, 2]),
        env_s=results.env_s,
        policy_s=results.policy_s,
        records=records,
        lost_episodes=num_lost,
        first_pictures={
            tasks[number]: results.pictures[number] for number in range(min(len(tasks), len(results.pictures)))
        },
        decoding=decoding,
        per_agent={
            agent: (_mean(found[:, 0]), _mean(found[:, 1]), _mean(found[:, 2]))
            for agent, found in results.agents.items()
        },
    )


def _mean(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else float("nan")
