"""Warnings about training runs that do not learn, from their metrics alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_KL = 0.2
MAX_FIRST_KL = 0.005
MAX_CLIP_FRACTION, CLIPPED_ITERATIONS = 0.3, 3
MIN_ENTROPY_FRACTION, COLLAPSED_ITERATIONS, SOLVED_RATE = 0.1, 2, 0.9
UNSUCCESSFUL_ITERATIONS = 5
BAD_CRITIC_ITERATIONS = 5
IDLE_ITERATIONS = 3


@dataclass(frozen=True)
class HealthWarning:
    """A sign that a run does not learn.

    Attributes:
        code: stable identifier, explained in docs/learning_problems.md.
        iteration: of the row that showed it.
        message: what was seen, with the numbers.
        hint: what to try.
    """

    code: str
    iteration: int
    message: str
    hint: str

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {self.message}; hint: {self.hint} (code: {self.code})"


class HealthMonitor:
    """Looks at the metrics of one iteration after the other; every warning is given once per run.

    A healthy run of the shipped examples stays far away from all thresholds (KL below 0.04, clip fraction below 0.09,
    entropy above 88 % of its first value):

    * ``kl-too-large``: ``train/approx_kl`` above ``MAX_KL`` = 0.2 nats.
    * ``logprobs-disagree``: ``train/first_minibatch_kl``, taken before the first step of an update, above
      ``MAX_FIRST_KL`` = 0.005. There the weights are those of the rollout and every probability ratio is 1, up to
      rounding: 0.0004 with rollouts in bfloat16, below 1e-6 in float32. More means that ``evaluate_actions`` and
      ``predict_action_batch`` of the policy disagree.
    * ``clip-fraction-too-large``: ``train/clip_fraction`` above ``MAX_CLIP_FRACTION`` = 0.3 in ``CLIPPED_ITERATIONS`` =
      3 consecutive iterations.
    * ``entropy-collapse``: ``train/entropy`` below ``MIN_ENTROPY_FRACTION`` = 10 % of the run's first value in
      ``COLLAPSED_ITERATIONS`` = 2 consecutive iterations, while fewer than ``SOLVED_RATE`` = 90 % of the training
      episodes succeed. Not checked for policies whose entropy is not positive.
    * ``no-success``: no training episode succeeded in ``UNSUCCESSFUL_ITERATIONS`` = 5 consecutive iterations.
    * ``critic-worse-than-mean``: ``train/explained_variance`` below 0 in ``BAD_CRITIC_ITERATIONS`` = 5 consecutive
      iterations.
    * ``no-update``: no optimizer step in ``IDLE_ITERATIONS`` = 3 consecutive iterations, e.g. as every group of DAPO
      succeeded or failed as a whole.

    Args:
        rows: metrics of earlier iterations (a resumed run), whose warnings are not repeated.
    """

    def __init__(self, rows: Iterable[Mapping[str, object]] = ()) -> None:
        self._given: set[str] = set()
        self._streaks: dict[str, int] = {}
        self._first_entropy: float | None = None
        for row in rows:
            self.check(row)

    def check(self, row: Mapping[str, Any]) -> list[HealthWarning]:
        """Return the new warnings of an iteration."""
        found = [
            HealthWarning(code, int(row["iteration"]), message, hint)
            for code, message, hint in (
                self._first_kl(row),
                self._kl(row),
                self._clip_fraction(row),
                self._entropy(row),
                self._success(row),
                self._critic(row),
                self._idle(row),
            )
            if message and code not in self._given
        ]
        self._given |= {warning.code for warning in found}
        return found

    def _lasts(self, code: str, bad: bool | None, iterations: int) -> bool:
        """Count consecutive bad iterations; None (no such metric) leaves the count as it is."""
        if bad is not None:
            self._streaks[code] = self._streaks.get(code, 0) + 1 if bad else 0
        return bool(bad) and self._streaks[code] >= iterations

    def _first_kl(self, row: Mapping[str, object]) -> tuple[str, str, str]:
        code, kl = "logprobs-disagree", _number(row, "train/first_minibatch_kl")
        if kl is None or kl <= MAX_FIRST_KL:
            return code, "", ""
        message = f"before the first step, the log-probs of training differ from those of the rollout (KL {kl:.2g})"
        hint = "make evaluate_actions return the log-probs of predict_action_batch: same temperature, mask and dtype"
        return code, message, hint

    def _kl(self, row: Mapping[str, object]) -> tuple[str, str, str]:
        code, kl = "kl-too-large", _number(row, "train/approx_kl")
        if kl is None or kl <= MAX_KL:
            return code, "", ""
        return code, f"the update moved the policy by a KL of {kl:.3g} (expected: below {MAX_KL})", _SMALLER_UPDATES

    def _clip_fraction(self, row: Mapping[str, object]) -> tuple[str, str, str]:
        code, fraction = "clip-fraction-too-large", _number(row, "train/clip_fraction")
        bad = None if fraction is None else fraction > MAX_CLIP_FRACTION
        if not self._lasts(code, bad, CLIPPED_ITERATIONS):
            return code, "", ""
        message = f"{fraction:.0%} of the probability ratios are clipped, in {CLIPPED_ITERATIONS} iterations in a row"
        return code, message, _SMALLER_UPDATES

    def _entropy(self, row: Mapping[str, object]) -> tuple[str, str, str]:
        code, entropy = "entropy-collapse", _number(row, "train/entropy")
        if self._first_entropy is None:
            self._first_entropy = entropy
        first, success = self._first_entropy, _number(row, "rollout/success_rate")
        bad = None
        if entropy is not None and first is not None and first > 0:
            bad = entropy < MIN_ENTROPY_FRACTION * first and (success is None or success < SOLVED_RATE)
        if not self._lasts(code, bad, COLLAPSED_ITERATIONS):
            return code, "", ""
        message = f"the entropy fell from {first:.3g} to {entropy:.2g}: the policy has stopped exploring"
        hint = "lower actor.optim.lr, or raise algorithm.entropy_bonus or algorithm.sampling.temperature"
        return code, message, hint

    def _success(self, row: Mapping[str, object]) -> tuple[str, str, str]:
        code, rate = "no-success", _number(row, "rollout/success_rate")
        if not self._lasts(code, None if rate is None else rate == 0, UNSUCCESSFUL_ITERATIONS):
            return code, "", ""
        message = f"no training episode succeeded in {UNSUCCESSFUL_ITERATIONS} iterations in a row"
        hint = "start from a policy that solves the task sometimes (embodrl collect and sft), or use a dense reward"
        return code, message, hint

    def _critic(self, row: Mapping[str, object]) -> tuple[str, str, str]:
        code, variance = "critic-worse-than-mean", _number(row, "train/explained_variance")
        if not self._lasts(code, None if variance is None else variance < 0, BAD_CRITIC_ITERATIONS):
            return code, "", ""
        message = f"the critic's explained variance is below 0 ({variance:.2g}): it predicts worse than the mean return"
        hint = "raise actor.optim.value_lr or actor.optim.critic_warmup_iterations, or choose a loss without a critic"
        return code, message, hint

    def _idle(self, row: Mapping[str, object]) -> tuple[str, str, str]:
        code, updates = "no-update", _number(row, "train/num_updates")
        if not self._lasts(code, None if updates is None else updates == 0, IDLE_ITERATIONS):
            return code, "", ""
        message = f"nothing was trained in {IDLE_ITERATIONS} iterations in a row: no optimizer step"
        hint = "algorithm.filter drops groups without both successes and failures: begin with a policy that succeeds"
        return code, message, f"{hint} sometimes, or raise algorithm.group_size or algorithm.filter.max_resamples"


_SMALLER_UPDATES = "lower actor.optim.lr or algorithm.update_epoch, or raise actor.global_batch_size"


def find_warnings(rows: Iterable[Mapping[str, object]]) -> list[HealthWarning]:
    """Return all warnings of a run, in the order of its iterations."""
    monitor = HealthMonitor()
    return [warning for row in rows for warning in monitor.check(row)]


def _number(row: Mapping[str, object], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else None
