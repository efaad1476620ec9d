import pytest

from embodrl.reporting import progress
from embodrl.reporting.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_now_and_then_and_one_at_the_end(clock, capsys):
    with Progress("collect", 40, "episodes", "plain") as shown:
        for done, seconds in ((1, 1), (10, 10), (11, 11), (30, 30), (40, 40), (40, 41)):
            clock[0] = 100.0 + seconds
            shown.update(done, "fine")
    assert capsys.readouterr().out.splitlines() == [
        "collect: 10/40 episodes, 1.0/s, ETA 30 s  fine",
        "collect: 30/40 episodes, 1.0/s, ETA 10 s  fine",
        "collect: 40/40 episodes, 1.0/s, ETA 0 s  fine",
    ]


def test_off_says_nothing(clock, capsys):
    with Progress("collect", 2, "episodes", "off") as shown:
        shown.update(2)
        shown.message("done")
    assert capsys.readouterr().out == ""


def test_auto_is_plain_without_a_terminal_and_messages_are_shown(capsys):
    with Progress("sft", 2, "steps") as shown:
        assert shown.mode == "plain"
        shown.message("saved")
    assert capsys.readouterr().out == "saved\n"


def test_a_bar_shows_messages_too(clock, capsys):
    with Progress("sft", 2, "steps", "rich") as shown:
        shown.update(1, "loss 1.000")
        shown.message("step 1: success rate 50.0%")
        shown.update(2)
    assert "success rate 50.0%" in capsys.readouterr().out
