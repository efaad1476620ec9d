"""The cells of fault_matrix.py for policy servers: what `embodrl eval model=remote` does when its server has a fault.

A server that ends is started again after ``AWAY_S``, as what supervises it would. Detection is the first line of the
evaluation that names the server.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil
from fault_matrix import CELL_S, CONTINUES, LEAK, Cell, inflict
from soak_served import Server, connections, shut_down

from embodrl.serving.wire import TOKEN_VARIABLE

AWAY_S = 3.0
BEGUN = 20
"""Requests that the server has answered when it gets the fault."""
TOKEN = "a-token-of-the-matrix"
EVALUATION = (
    *("env=toy", "env.tasks=[reach-red]", "env.cameras=[{height:16,width:16}]", "env.num_processes=1"),
    *("env.max_episode_steps=30", "env.eval.total_num_envs=4", "env.eval.num_episodes=4000"),
    *("model=remote", "model.num_action_chunks=3", "cluster.device=cpu"),
)


def answered(server: Server) -> int:
    """Return how many requests a server has answered in this life; 0 while it can't be asked."""
    url = f"http://127.0.0.1:{server.port}/metrics?token={TOKEN}"
    try:
        text = urllib.request.urlopen(url, timeout=5).read().decode()
    except OSError:
        return 0
    return sum(int(number) for number in re.findall(r"^embodrl_serve_requests_total\{.*\} (\d+)", text, re.M))


def try_cell(name: str, fault: str) -> Cell:
    """Run a cell."""
    with tempfile.TemporaryDirectory() as directory:
        place, over = Path(directory), threading.Event()
        (place / "leak.py").write_text(LEAK)
        os.environ["PYTHONPATH"] = f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        os.environ[TOKEN_VARIABLE] = TOKEN
        server = Server("server", place, TOKEN, "extensions=[leak]")
        server.start()
        asyncio.run(server.ready())
        command = [sys.executable, "-m", "embodrl", "eval", *EVALUATION, f"model.url={server.url('openpi')}"]
        with (place / "eval.log").open("wb") as log:
            evaluation = subprocess.Popen(
                [*command, "--output", str(place / "eval")], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            return _cell(name, fault, server, evaluation, place / "eval.log", over)
        finally:
            over.set()
            for process in (evaluation, server.of):
                if process.poll() is None:
                    process.kill()
                process.wait()


def _cell(
    name: str, fault: str, server: Server, evaluation: subprocess.Popen[bytes], log: Path, over: threading.Event
) -> Cell:
    deadline = time.monotonic() + CELL_S
    while answered(server) < BEGUN and evaluation.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if evaluation.poll() is not None:
        return Cell(name, fault, None, "did not start", evaluation.poll(), 0, 0, log.read_text()[-2000:])
    before, life = answered(server), server.lives
    victim, start = psutil.Process(server.of.pid), time.monotonic()
    if fault == "disconnect":
        for descriptor in connections(server):
            shut_down(server, descriptor)
    else:
        inflict(fault, victim, False, over)
    detected, told, ended, continues = None, "", 0.0, False
    while evaluation.poll() is None and not continues and time.monotonic() - start < CELL_S:
        lines = log.read_text(errors="replace").splitlines()
        told = told or next((line for line in lines if server.url("openpi") in line and "can't" in line), "")
        if told and detected is None:
            detected = time.monotonic() - start
        if server.of.poll() is not None:
            ended = ended or time.monotonic()
            if time.monotonic() - ended >= AWAY_S:
                server.start()
                ended = 0.0
        else:
            wanted = BEGUN + (before if server.lives == life else 0)
            continues = (fault == "slow" or detected is not None) and answered(server) >= wanted
        time.sleep(0.05)
    over.set()
    family = [] if evaluation.poll() is not None else psutil.Process(evaluation.pid).children(recursive=True)
    if continues:
        evaluation.terminate()
        evaluation.wait(CELL_S)
    code = evaluation.poll()
    outcome = CONTINUES if continues else "HANGS" if code is None else f"ends with {code}"
    alive = psutil.wait_procs(family, timeout=10)[1]
    return Cell(name, fault, detected, outcome, code, 0, len(alive), told)
