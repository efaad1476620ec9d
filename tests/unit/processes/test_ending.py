"""The end of a process: its exit handlers, its output, and nothing that could hold it up."""

import subprocess
import sys
import textwrap
from pathlib import Path

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


def test_what_is_buffered_is_written_by_handlers_and_to_files(tmp_path: Path) -> None:
    code, said = ended(f"""
        import atexit, ctypes, logging
        from embodrl.processes.ending import leave

        kept = open({str(tmp_path / "open")!r}, "w")
        kept.write("text")
        raw = open({str(tmp_path / "raw")!r}, "wb")
        raw.write(b"bytes")
        closed = open({str(tmp_path / "closed")!r}, "w")
        closed.close()
        atexit.register(lambda: kept.write(" and more"))
        logging.basicConfig(filename={str(tmp_path / "log")!r}, format="%(message)s")
        atexit.register(logging.warning, "a record")
        ctypes.CDLL(None).printf(b"from C")
        leave(0, 60.0)
    """)
    assert (code, said) == (0, "from C")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"open": "text and more", "raw": "bytes", "closed": "", "log": "a record\n"}


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
