"""What a rollout process does with weights that it can't apply."""

import logging
import queue

import pytest

from embodrl.errors import IncompleteSyncError
from embodrl.workers.weights import ReceiverThread


class Refusing:
    """A receiver of one version, which it does not apply."""

    def __init__(self, error):
        self.errors = [error]

    is_broken = False

    def receive(self, timeout_s=None):
        if self.errors:
            raise self.errors.pop()
        return None

    def close(self):
        pass


class Answers(queue.Queue):
    def put(self, value, timeout_s):  # type: ignore[override]
        super().put(value, timeout=timeout_s)


@pytest.mark.parametrize(
    ("error", "level", "told"),
    [
        (IncompleteSyncError("4 of 5 buckets came"), logging.WARNING, "weight update rejected: 4 of 5 buckets came"),
        (RuntimeError("no memory"), logging.ERROR, "no further weight updates are accepted"),
    ],
)
def test_a_refusal_is_answered_and_in_the_log_of_the_process(caplog, error, level, told):
    answers = Answers()
    inbox = ReceiverThread(Refusing(error), answers, 3)  # type: ignore[arg-type]
    try:
        answer = answers.get(timeout=60.0)
    finally:
        inbox.close()
    assert answer["generation"] == 3 and answer["version"] == -1 and str(error) in answer["problem"]
    assert [(r.levelno, r.getMessage().splitlines()[0]) for r in caplog.records] == [(level, told)]
    assert (caplog.records[0].exc_info is not None) == (level == logging.ERROR)
