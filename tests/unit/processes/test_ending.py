"""The end of a process: its exit handlers, its output, and nothing that could hold it up."""

import subprocess
import sys
import textwrap

import pytest


def ended(program: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout


def test_exit_handlers_run_and_threads_are_not_waited_for() -> None:
    code, said = ended("""
        import atexit, threading
        from embodrl.processes.ending import leave

        atexit.register(print, "handler")
        threading.Thread(target=threading.Event().wait).start()
        print("output", end=" ")
        leave(143, 60.0)
    """)
    assert (code, said) == (143, "output handler\n")


def test_an_exit_handler_that_hangs_does_not_hold_it_up() -> None:
    code, _ = ended("""
        import atexit, threading
        from embodrl.processes.ending import leave

        atexit.register(threading.Event().wait)
        leave(143, 0.01)
    """)
    assert code == 143


def test_simulators_that_hang_are_closed_within_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from embodrl.envs.pool import manager
    from embodrl.envs.pool.pool import EnvPool

    asked: list[str] = []
    deadlines: list[float | None] = []
    monkeypatch.setattr(manager.EnvManager, "close_async", lambda self: asked.append(self.name))
    monkeypatch.setattr(
        manager.EnvManager, "close", lambda self, deadline: deadlines.append(deadline) or asked.append("")
    )
    EnvPool([manager.EnvManager("toy", name=name) for name in ("a", "b", "c")]).close()
    assert asked == ["a", "b", "c", "", "", ""]
    assert len(set(deadlines)) == 1 and deadlines[0] is not None
