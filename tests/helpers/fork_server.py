"""Processes without their imports: one that has imported what a run needs is forked for each.

What a process does from there on is what it does as one of its own: own memory, signals, descriptors, environment,
parent, exit handlers. Importing torch and transformers takes longer than most runs of the tests do.

Two kinds of processes are forked: command lines (``ForkServer.run``), and what embodrl starts itself, workers and
simulators (``WarmPopen`` takes the place of ``subprocess.Popen``). EMBODRL_TESTS_COLD=1 starts the latter as users do.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import itertools
import json
import os
import platform
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

PRELOADED = (
    "embodrl.runs.train",
    "embodrl.runs.sft",
    "embodrl.models.openvla",
    "hydra",
    "transformers.models.qwen3.modeling_qwen3",
)
ZYGOTE = "zygote of the tests"
"""What the command line of a process reads that only forks others."""
_MESSAGE_BYTES = 1 << 18
_MAX_DESCRIPTORS = 64
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_CLONE_PARENT = 0x8000
_CLONE_SYSCALL = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_PR_SET_PDEATHSIG = 1
_PACKAGE = str(Path(__file__).resolve().parents[2] / "embodrl") + os.sep
_EXIT = os._exit  # embodrl puts another in its place
COLD = bool(os.environ.get("EMBODRL_TESTS_COLD")) or _CLONE_SYSCALL is None


class ForkServer:
    """The other end, in the process of the tests.

    Args:
        hash_seed: of all its runs; sets have another order in those of another server.
    """

    def __init__(self, hash_seed: int) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # The last argument makes room for the command lines of the processes that it forks.
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), " " * 2000],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | _ONE_THREAD | {"PYTHONHASHSEED": str(hash_seed)},
            )

    def run(
        self, arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float, script: Path | None = None
    ) -> tuple[int, str, str]:
        """Run a command line of embodrl, or a script, to its end.

        Returns:
            its exit code as subprocess has it, what it wrote and its errors.

        Raises:
            TimeoutError: it takes longer; it is killed.
        """
        request = {"arguments": list(arguments), "environ": dict(environ), "directory": str(Path.cwd())}
        request["script"] = str(script or "")
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            reading, writing = os.pipe()
            status = stack.enter_context(os.fdopen(reading))
            message = json.dumps(request | {"kind": "run"}).encode()
            socket.send_fds(self.socket, [message], [out.fileno(), err.fileno(), writing])
            os.close(writing)
            if not (begun := status.readline()):
                raise RuntimeError(f"the server of runs has gone, with exit code {self._process.wait(60.0)}")
            try:
                if not select.select([status], [], [], timeout_s)[0]:
                    raise TimeoutError(f"{arguments} took longer than {timeout_s:g} s")
                code = os.waitstatus_to_exitcode(int(status.readline()))
            except BaseException:  # the time of a test is over, say
                os.kill(int(begun), signal.SIGKILL)
                raise
            out.seek(0)
            err.seek(0)
            return code, out.read().decode(), err.read().decode()


@functools.cache
def fork_server(hash_seed: int) -> ForkServer:
    """Start a server when it is first needed."""
    return ForkServer(hash_seed)


@functools.cache
def fork_servers() -> Iterator[ForkServer]:
    """Two take turns: what depends on the order of a set shows where a run is compared with the one before."""
    return itertools.cycle([fork_server(1), fork_server(2)])


class WarmPopen(subprocess.Popen):
    """``subprocess.Popen``, which has the processes that embodrl starts forked by a server that has their imports.

    They are children of the process that asks for them, as others are.
    """

    simulators = False
    """Whether simulators are forked as well; they import little, unless the server is there anyhow."""
    _lock = threading.Lock()

    @staticmethod
    def server() -> socket.socket:
        """Return the socket of the server, whose parent is this process."""
        return fork_server(1).socket

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *others: Any) -> None:
        if not self._is_warm(args):
            super()._execute_child(args, executable, preexec_fn, close_fds, *others)  # type: ignore[misc]
            return
        pass_fds, cwd, env, _, _, _, *pipes = others[:12]
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        process_group = others[-1]
        standard = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "kind": "child",
            "arguments": list(map(os.fspath, args)),
            "environ": dict(os.environ if env is None else env),
            "directory": os.fspath(cwd or Path.cwd()),
            "descriptors": [0, 1, 2, *map(int, pass_fds)],
            "process_group": process_group,
        }
        with self._lock:
            socket.send_fds(self.server(), [json.dumps(request).encode()], [*standard, *map(int, pass_fds)])
            self.pid = int(self.server().recv(64))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _is_warm(self, args: Any) -> bool:
        if isinstance(args, str | bytes) or len(args) < 3 or args[0] != sys.executable:
            return False
        is_worker = list(args[1:3]) == ["-P", "-m"] and args[3].startswith("embodrl.")
        return is_worker or (self.simulators and str(args[1]).startswith(_PACKAGE))


def install(server: socket.socket | None = None) -> None:
    """Fork what this process starts from here on, simulators as well if the server is given."""
    if COLD:
        return
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    if server is not None:
        WarmPopen.simulators = True
        WarmPopen.server = staticmethod(lambda: server)  # type: ignore[method-assign]


# -- in the server ---------------------------------------------------------------------------------------------------


def serve(server: socket.socket) -> dict[str, Any]:
    """Fork for each request; return it in the new process when that is set up."""
    plain = sys.path[1:]  # without the directory of this file
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, _MESSAGE_BYTES, _MAX_DESCRIPTORS)
        if not message:  # who asked has ended
            os._exit(0)
        request = json.loads(message)
        request["plain_path"] = plain
        if request["kind"] == "child":
            if _fork_sibling() == 0:
                _become_child(request, descriptors, server)
                return request
        elif os.fork() == 0:
            out, err, status = descriptors
            if pid := os.fork():
                _report(pid, out, err, status)
            for descriptor, number in ((out, 1), (err, 2)):
                os.dup2(descriptor, number)
            for descriptor in (out, err, status, server.detach()):
                os.close(descriptor)
            _enter(request)
            # As of `python -c`: the working directory, PYTHONPATH, and what was there; or the directory of the script.
            script = request["script"]
            sys.path[:] = [str(Path(script).parent) if script else "", *_python_path(), *plain]
            sys.argv = [script or "-c", *request["arguments"]]
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _fork_sibling() -> int:
    """Fork a process whose parent is that of this one, which has a single thread."""
    python = ctypes.pythonapi
    native = ctypes.PyDLL(None, use_errno=True)
    python.PyOS_BeforeFork()
    pid = native.syscall(_CLONE_SYSCALL, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def _become_child(request: dict[str, Any], descriptors: list[int], server: socket.socket) -> None:
    """Take descriptors, environment, process group and command line; tell the parent who this is."""
    import fcntl

    signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = request["descriptors"]
    answer = fcntl.fcntl(server.detach(), fcntl.F_DUPFD_CLOEXEC, max(wanted) + 1)
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, max(wanted) + 1) for each in descriptors]
    os.closerange(3, max(wanted) + 1)
    for descriptor, number in zip(high, wanted, strict=True):
        os.dup2(descriptor, number, inheritable=number < 3)
        os.close(descriptor)
    if request["process_group"] >= 0:
        os.setpgid(0, request["process_group"])
    _enter(request)
    set_command_line(request["arguments"])
    if os.environ.get("PYTHONUNBUFFERED"):
        for name, number in (("stdout", 1), ("stderr", 2)):
            raw = io.FileIO(number, "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True))  # type: ignore[arg-type]
    with socket.socket(fileno=answer) as reply:
        reply.send(str(os.getpid()).encode())


def _enter(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["directory"])
    np.random.seed()


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _report(pid: int, *descriptors: int) -> None:
    """Tell number and end of a run, and end."""
    out, err, status = descriptors
    os.close(out)
    os.close(err)
    os.write(status, f"{pid}\n".encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(status, f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


def set_command_line(arguments: Sequence[str]) -> None:
    """Write over the memory that /proc/PID/cmdline shows, as far as there is room."""
    start, end = (int(each) for each in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = b"\0".join(each.encode() for each in arguments)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def run_child(request: dict[str, Any]) -> None:
    """Do what the interpreter does with its arguments."""
    _, first, *rest = request["arguments"]
    if first == "-P":
        rest = rest[1:]  # without -m
        sys.path[:] = [*_python_path(), *request["plain_path"]]
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] == "embodrl"]:
            del sys.modules[name]  # it loads the package its own way
        sys.path[:] = [str(Path(first).parent), *_python_path(), *request["plain_path"]]
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    """Import, serve, and in a forked process do what is asked for."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that the end of each process need not look at all that was imported
    set_command_line([ZYGOTE])
    with socket.socket(fileno=int(sys.argv[1])) as server:
        request = serve(server)
    if request["kind"] == "run" and not request["environ"].get("EMBODRL_TESTS_COLD"):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            set_command_line([sys.executable, *sys.argv])
            install(ours)
        else:
            ours.close()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            request = serve(theirs)
    try:
        if request["kind"] == "child":
            run_child(request)
        elif request["script"]:
            runpy.run_path(request["script"], run_name="__main__")
        else:
            from embodrl.cli.main import main as command_line

            command_line()
    except SystemExit as leaving:
        leave(leaving.code)
    leave(0)


def leave(code: object) -> NoReturn:
    """End as the interpreter does, but for taking every module apart, which takes longer than a short run.

    With EMBODRL_TESTS_COLD it does that as well.
    """
    if os.environ.get("EMBODRL_TESTS_COLD"):
        sys.exit(code)  # type: ignore[arg-type]
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    _EXIT(int(code or 0) if isinstance(code, int | None) else 1)


if __name__ == "__main__":
    main()
