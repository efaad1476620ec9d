"""Early stopping and the regression gate: decisions from the evaluations of a run."""

from __future__ import annotations

from collections.abc import Sequence

from embodrl.errors import EmbodrlError
from embodrl.reporting.metrics_file import Row
from embodrl.reporting.rows import is_number

SUCCESS = "eval/success_rate"


def is_solved(rows: Sequence[Row], success_rate: float | None, evaluations: int) -> bool:
    """Whether each of the last ``evaluations`` reached a success rate (0 to 1; None is never reached).

    An evaluation before the first update does not count.
    """
    if success_rate is None:
        return False
    rates = [row[SUCCESS] for row in rows if row["iteration"] and is_number(row.get(SUCCESS))]
    return len(rates) >= evaluations and min(rates[-evaluations:]) >= success_rate


def regression(rows: Sequence[Row], allowed: float | None) -> EmbodrlError | None:
    """Return an error if the last row's evaluation is more than ``allowed`` (None: any) below the best earlier one."""
    rates = [(float(row[SUCCESS]), int(row["iteration"])) for row in rows if is_number(row.get(SUCCESS))]
    if allowed is None or len(rates) < 2 or not is_number(rows[-1].get(SUCCESS)):
        return None
    (last, iteration) = rates[-1]
    (best, at) = max(rates[:-1], key=lambda each: each[0])
    if best - last <= allowed:
        return None
    where = f"the best checkpoint, with runner.keep_best, and policy_best/ are those of iteration {at}"
    if not at:
        where = "no saved checkpoint is better than the initial policy (model.warm_start)"
    return EmbodrlError(
        f"the evaluation after iteration {iteration} has a success rate of {last:.3f}, {best - last:.3f} below the"
        f" best, {best:.3f} after iteration {at}: more than runner.max_regression={allowed:g}",
        f"{where}; to train on, resume with runner.max_regression=null",
        code="evaluation-regressed",
    )
