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


def test_what_an_earlier_process_has_done_is_not_in_the_rate(clock, capsys):
    with Progress("sft", 40, "steps", "plain") as shown:
        clock[0] = 150.0  # until the first step
        shown.start_at(20)
        clock[0] = 160.0
        shown.update(25)
    assert capsys.readouterr().out.splitlines() == ["sft: 25/40 steps, 0.5/s, ETA 30 s  "]


def test_what_interrupts_it_has_lines_of_its_own_and_is_not_in_the_rate(clock, capsys):
    with Progress("sft", 40, "steps", "plain") as shown:
        clock[0] = 110.0
        shown.update(10)
        with shown.within("evaluation", 8, "episodes") as inner:
            clock[0] = 150.0
            inner.update(8, "success 50%")
        clock[0] = 160.0
        shown.update(20)
    assert capsys.readouterr().out.splitlines() == [
        "sft: 10/40 steps, 1.0/s, ETA 30 s  ",
        "evaluation: 8/8 episodes, 0.2/s, ETA 0 s  success 50%",
        "sft: 20/40 steps, 1.0/s, ETA 20 s  ",
    ]


def test_units_of_uneven_length_have_no_rate(clock, capsys):
    with Progress("sweep", 12, "iterations", "plain", is_even=False) as shown:
        clock[0] = 110.0
        shown.update(2, "seed-1 2/6")
    assert capsys.readouterr().out == "sweep: 2/12 iterations  seed-1 2/6\n"


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
