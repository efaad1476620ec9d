"""What `make chaos` draws and how it judges; the runs themselves take minutes."""

from __future__ import annotations

from chaos import MEMBERS, SIGNALS, draw
from chaos_learners import LEARNERS, difference
from scenarios import Result

ROWS = [{"iteration": 0, "eval/success_rate": 0.5}, {"iteration": 1, "train/loss": 0.25, "env/restarts": 0}]


def result(*rows: dict[str, object], policy: str = "abc") -> Result:
    return {"rows": list(rows), "policy": policy}


def test_a_seed_and_a_number_are_one_trial() -> None:
    learners = list(LEARNERS)
    drawn = [draw(7, number, learners) for number in range(300)]
    assert drawn == [draw(7, number, learners) for number in range(300)]
    assert drawn != [draw(8, number, learners) for number in range(300)]
    blows = [blow for record in drawn for blow in record.schedule]
    assert {record.learner for record in drawn} == set(learners)
    assert {len(record.schedule) for record in drawn} == {1, 2, 3}
    assert {blow.signals for blow in blows} == set(SIGNALS) and {blow.who for blow in blows} == set(MEMBERS)


def test_restarts_in_place_and_rows_that_come_late_are_no_difference() -> None:
    late = [{"iteration": 0}, {**ROWS[1], "env/restarts": 1}, ROWS[0]]
    assert not difference(result(*ROWS), result(*late), exact=True)


def test_any_other_difference_is_named() -> None:
    other = result(ROWS[0], {**ROWS[1], "train/loss": 0.5})
    assert "train/loss of row 1 is 0.5 in place of 0.25" in difference(result(*ROWS), other, exact=True)
    assert not difference(result(*ROWS), other, exact=False)
    assert "policy" in difference(result(*ROWS), result(*ROWS, policy="def"), exact=True)


def test_lost_episodes_that_the_rows_count_may_change_what_is_trained() -> None:
    lost = [ROWS[0], {**ROWS[1], "train/loss": 0.5, "rollout/lost_episodes": 2}]
    assert not difference(result(*ROWS), result(*lost), exact=True)
