"""Command lines without their imports: a process that has imported what a run needs is forked for each.

What a run does from there on is what it does as a process of its own: own memory, signals, descriptors, environment,
exit handlers. Importing torch and transformers takes longer than most runs of the tests do.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

PRELOADED = (
    "embodrl.runs.train",
    "embodrl.runs.sft",
    "embodrl.models.openvla",
    "hydra",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "transformers.models.qwen3.modeling_qwen3",
)
_MESSAGE_BYTES = 1 << 18


class ForkServer:
    """The other end, in the process of the tests.

    Args:
        hash_seed: of all its runs; sets have another order in those of another server.
    """

    def __init__(self, hash_seed: int) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(hash_seed)},
            )

    def run(self, arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> tuple[int, str, str]:
        """Run a command line to its end; return its exit code as subprocess does, what it wrote and its errors.

        Raises:
            TimeoutError: it takes longer; it is killed.
        """
        request = json.dumps({"arguments": list(arguments), "environ": dict(environ), "directory": str(Path.cwd())})
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            reading, writing = os.pipe()
            status = stack.enter_context(os.fdopen(reading))
            socket.send_fds(self._socket, [request.encode()], [out.fileno(), err.fileno(), writing])
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


def serve(server: socket.socket) -> list[str]:
    """Fork for each request; return in the new process, with its arguments, when it is set up."""
    plain = sys.path[1:]  # without the directory of this file
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, _MESSAGE_BYTES, 3)
        if not message:  # the tests have ended
            sys.exit()
        if os.fork() == 0:
            request, (out, err, status) = json.loads(message), descriptors
            if pid := os.fork():
                _report(pid, out, err, status)
            for descriptor, number in ((out, 1), (err, 2)):
                os.dup2(descriptor, number)
            for descriptor in (out, err, status, server.detach()):
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(request["environ"])
            os.chdir(request["directory"])
            np.random.seed()
            # As of `python -c`: the working directory, PYTHONPATH, and what was there.
            sys.path[:] = ["", *filter(None, request["environ"].get("PYTHONPATH", "").split(os.pathsep)), *plain]
            return request["arguments"]
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _report(pid: int, *descriptors: int) -> None:
    """Tell number and end of a run, and end."""
    out, err, status = descriptors
    os.close(out)
    os.close(err)
    os.write(status, f"{pid}\n".encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(status, f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


def main() -> None:
    """Import, serve, and in a forked process run the command line."""
    for name in PRELOADED:
        importlib.import_module(name)
    with socket.socket(fileno=int(sys.argv[1])) as server:
        sys.argv = ["-c", *serve(server)]
    from embodrl.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
