"""Warnings about training runs that do not learn, from their metrics alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from embodrl.reporting.rows import is_number

MAX_KL = 0.2
MAX_FIRST_KL = 0.005
MAX_CLIP_FRACTION = 0.3
CLIPPED_ITERATIONS = 3
MIN_ENTROPY_FRACTION = 0.1
COLLAPSED_ITERATIONS = 2
SOLVED_RATE = 0.9
UNSUCCESSFUL_ITERATIONS = 5
BAD_CRITIC_ITERATIONS = 5
IDLE_ITERATIONS = 3
BLIND_EPISODES = 16
MISPAID_ITERATIONS = 3
MAX_Q_RATIO = 20.0
DIVERGED_ITERATIONS = 3


@dataclass(frozen=True)
class HealthWarning:
    """A sign that a run does not learn; ``code`` is explained in docs/it_does_not_learn.md."""

    code: str
    iteration: int
    message: str
    hint: str

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {self.message}; hint: {self.hint} (code: {self.code})"


class HealthMonitor:
    """Checks the metrics of each iteration; gives every warning once per run.

    A healthy run of the shipped examples stays far from all thresholds (KL below 0.04, clip fraction below 0.09,
    entropy above 88 % of its first value):

    * ``kl-too-large``: ``train/approx_kl`` above ``MAX_KL`` = 0.2 nats.
    * ``logprobs-disagree``: ``train/first_minibatch_kl``, from before the first step of an update, above
    ``MAX_FIRST_KL`` = 0.005. At that point the rollout's weights are still in use and every probability ratio is 1, up
    to rounding: 0.0004 with rollouts in bfloat16, below 1e-6 in float32. A larger value means that ``evaluate_actions``
    and ``predict_action_batch`` of the policy disagree.
    * ``clip-fraction-too-large``: ``train/clip_fraction`` above ``MAX_CLIP_FRACTION`` = 0.3 in ``CLIPPED_ITERATIONS`` =
    3 consecutive iterations.
    * ``entropy-collapse``: ``train/entropy`` below ``MIN_ENTROPY_FRACTION`` = 10 % of the run's first value in
    ``COLLAPSED_ITERATIONS`` = 2 consecutive iterations, while fewer than ``SOLVED_RATE`` = 90 % of the training
    episodes succeed. Not checked for policies whose entropy is not positive.
    * ``no-success``: no training episode succeeded in ``UNSUCCESSFUL_ITERATIONS`` = 5 consecutive iterations.
    * ``critic-worse-than-mean``: ``train/explained_variance`` below 0 in ``BAD_CRITIC_ITERATIONS`` = 5 consecutive
    iterations.
    * ``no-update``: no optimizer step in ``IDLE_ITERATIONS`` = 3 consecutive iterations, e.g. since every group of DAPO
    succeeded or failed as a whole.
    * ``warm-start-without-task``: a run from a warm start solved none of at least ``BLIND_EPISODES`` = 16 episodes in
    the evaluation before its first update.
    * ``failure-pays``: failed episodes of a rollout earned as much as solved ones on average, in ``MISPAID_ITERATIONS``
    = 3 consecutive iterations with both.
    * ``critic-divergence``: the mean Q of an off-policy run exceeds ``MAX_Q_RATIO`` = 20 times the largest mean return
    of its episodes (at least 1) and grows, in ``DIVERGED_ITERATIONS`` = 3 consecutive iterations.

    An off-policy run, recognised by its replay buffer, is only checked for success, warm start, reward and critics: the
    entropy of its actors is a density's and is steered to a target, and it makes no updates until its buffer is filled.

    Args:
        rows: metrics of earlier iterations (a resumed run), whose warnings are not repeated.
        warm_started: the policy began with weights that were trained on its task.
    """

    def __init__(self, rows: Iterable[Mapping[str, object]] = (), warm_started: bool = False) -> None:
        self._warm_started = warm_started
        self._largest_return = 1.0
        self._last_q = math.nan
        self._given: set[str] = set()
        self._streaks: dict[str, int] = {}
        self._first_entropy = math.nan
        for row in rows:
            self.check(row)

    def check(self, row: Mapping[str, Any]) -> list[HealthWarning]:
        found: list[HealthWarning] = []
        for sign in self._signs(row):
            if not math.isnan(sign.value):
                self._streaks[sign.code] = self._streaks.get(sign.code, 0) + 1 if sign.is_bad else 0
                if self._streaks[sign.code] >= sign.iterations and sign.code not in self._given:
                    found.append(HealthWarning(sign.code, int(row["iteration"]), sign.message, sign.hint))
                    self._given.add(sign.code)
        return found

    def _signs(self, row: Mapping[str, object]) -> Iterator[_Sign]:
        yield from self._any_signs(row)
        yield from self._off_policy_signs(row) if "replay/size" in row else self._on_policy_signs(row)

    def _any_signs(self, row: Mapping[str, object]) -> Iterator[_Sign]:
        success = _number(row, "rollout/success_rate")
        message = f"no training episode succeeded in {UNSUCCESSFUL_ITERATIONS} iterations in a row"
        hint = "start from a policy that solves the task sometimes (embodrl collect and sft), or use a dense reward"
        yield _Sign("no-success", success, success == 0, UNSUCCESSFUL_ITERATIONS, message, hint)

        first = _number(row, "eval/success_rate")
        episodes = _number(row, "eval/episodes")
        is_first = self._warm_started and row["iteration"] == 0 and episodes >= BLIND_EPISODES
        message = f"the warm start solves none of {episodes:.0f} episodes: it does not know this task"
        hint = "begin with a policy that was trained in this task, with these cameras and this instruction"
        yield _Sign("warm-start-without-task", first if is_first else math.nan, first == 0, 1, message, hint)

        solved = _number(row, "rollout/return_solved")
        failed = _number(row, "rollout/return_failed")
        message = f"failed episodes earn {failed:.3g} on average, solved ones {solved:.3g}: the reward pays for failing"
        hint = (
            "raise env.success_bonus, or choose env.reward_mode=potential or sparse, or fix reward.fn or reward.model"
        )
        measured = failed - solved
        yield _Sign("failure-pays", measured, measured >= 0, MISPAID_ITERATIONS, message, hint)

    def _off_policy_signs(self, row: Mapping[str, object]) -> Iterator[_Sign]:
        """Check for diverged critics; density entropies, ratios and clipping mean nothing here."""
        returned = abs(_number(row, "rollout/return"))
        q = abs(_number(row, "train/q_mean"))
        self._largest_return = max(self._largest_return, 0.0 if math.isnan(returned) else returned)
        message = (
            f"the critics' mean Q is {q:.3g} and grows; no episode has returned more than {self._largest_return:.3g}"
        )
        hint = "lower actor.optim.value_lr, algorithm.gamma or algorithm.off_policy.tau, and keep layer_norm on"
        is_bad = q > MAX_Q_RATIO * self._largest_return and not q <= self._last_q
        yield _Sign("critic-divergence", q, is_bad, DIVERGED_ITERATIONS, message, hint)
        self._last_q = self._last_q if math.isnan(q) else q

    def _on_policy_signs(self, row: Mapping[str, object]) -> Iterator[_Sign]:
        kl = _number(row, "train/first_minibatch_kl")
        message = f"before the first step, the log-probs of training differ from those of the rollout (KL {kl:.2g})"
        hint = "make evaluate_actions return the log-probs of predict_action_batch: same temperature, mask and dtype"
        yield _Sign("logprobs-disagree", kl, kl > MAX_FIRST_KL, 1, message, hint)

        kl = _number(row, "train/approx_kl")
        message = f"the update moved the policy by a KL of {kl:.3g} (expected: below {MAX_KL})"
        yield _Sign("kl-too-large", kl, kl > MAX_KL, 1, message, _SMALLER_UPDATES)

        clipped = _number(row, "train/clip_fraction")
        times = CLIPPED_ITERATIONS
        message = f"{clipped:.0%} of the probability ratios are clipped, in {times} iterations in a row"
        is_bad = clipped > MAX_CLIP_FRACTION
        yield _Sign("clip-fraction-too-large", clipped, is_bad, times, message, _SMALLER_UPDATES)

        entropy = _number(row, "train/entropy")
        success = _number(row, "rollout/success_rate")
        if math.isnan(self._first_entropy):
            self._first_entropy = entropy
        message = f"the entropy fell from {self._first_entropy:.3g} to {entropy:.2g}: the policy has stopped exploring"
        hint = "lower actor.optim.lr, or raise algorithm.entropy_bonus or algorithm.sampling.temperature"
        is_bad = entropy < MIN_ENTROPY_FRACTION * self._first_entropy and not success >= SOLVED_RATE
        measured = entropy if self._first_entropy > 0 else math.nan
        yield _Sign("entropy-collapse", measured, is_bad, COLLAPSED_ITERATIONS, message, hint)

        variance = _number(row, "train/explained_variance")
        message = f"the critic's explained variance is below 0 ({variance:.2g}): it predicts worse than the mean return"
        hint = "raise actor.optim.value_lr or actor.optim.critic_warmup_iterations, or choose a loss without a critic"
        yield _Sign("critic-worse-than-mean", variance, variance < 0, BAD_CRITIC_ITERATIONS, message, hint)

        updates = _number(row, "train/num_updates")
        message = f"nothing was trained in {IDLE_ITERATIONS} iterations in a row: no optimizer step"
        hint = (
            "algorithm.filter drops groups without both successes and failures: begin with a policy that succeeds"
            " sometimes, or raise algorithm.group_size or algorithm.filter.max_resamples"
        )
        yield _Sign("no-update", updates, updates == 0, IDLE_ITERATIONS, message, hint)


class _Sign(NamedTuple):
    """One row's evidence for a warning, which needs ``iterations`` bad rows in sequence; NaN does not count."""

    code: str
    value: float
    is_bad: bool
    iterations: int
    message: str
    hint: str


_SMALLER_UPDATES = "lower actor.optim.lr or algorithm.update_epoch, or raise actor.global_batch_size"


def find_warnings(rows: Iterable[Mapping[str, object]], warm_started: bool = False) -> list[HealthWarning]:
    """Return all warnings of a run, in the order of its iterations."""
    monitor = HealthMonitor(warm_started=warm_started)
    return [warning for row in rows for warning in monitor.check(row)]


def _number(row: Mapping[str, object], name: str) -> float:
    """Return a metric; NaN if it is missing or not finite."""
    value = row.get(name)
    return float(value) if is_number(value) else math.nan
