"""Machines that come and go, with a network namespace of Linux as each: ``python benchmarks/namespaces.py``.

    sudo python benchmarks/namespaces.py [--machines 2 4] [--cut-s 20] [--json FILE]

Machine 0 has Redis, with a password, and the trainer of an asynchronous run; each other one has a process that joined
it. While they gather, machine 1 loses its network for ``--cut-s``, its process is then killed (SIGKILL) and joins
again, the one of the last machine leaves (SIGTERM) and joins again, and the trainer is stopped and resumed. In the end
each rollout that was made has to be counted once, in the store, or on its way. Needs root, iproute2 and redis-server;
packets are delayed by netem, and where the kernel has none by cable.py, their rate limited by tbf.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis
from hardware import describe_hardware

from embodrl.storage.checkpoint import CheckpointManager
from embodrl.storage.json_file import write_json_file
from embodrl.store.rollout_shards import ROLLOUTS, Ledger
from embodrl.store.shards import place_of
from embodrl.store.urls import PASSWORD

PREFIX, SWITCH = "embodrl-m", "embodrl-switch"
RATE, DELAY_MS = "100mbit", 1
PORT, STORE = 6399, "run"
CONFIG = """
presets: {env: toy, model: mlp, algorithm: ppo_gaussian}
env:
  tasks: [reach-red]
  state: full
  pin_cpus: false
  num_processes: 1
  max_episode_steps: 10
  cameras: [{height: 16, width: 16}]
  train: {total_num_envs: 8, max_steps_per_rollout_epoch: 10, auto_reset: true}
  eval: {total_num_envs: 8, num_episodes: 8, decoding: greedy}
algorithm: {decoupled: {enabled: true}}
actor: {global_batch_size: 40, micro_batch_size: 40}
cluster: {num_threads: 1}
runner: {max_staleness: 1, eval_interval: 0, save_interval: 1, logger: {tensorboard: false, console: plain}}
store: {poll_s: 0.1}
"""
ROWS, OWN_ROWS, STEPS = 8, 4, 40
"""Environments of an update, and of a joined process; environment steps of one of its rollouts."""
LIMIT_S = 150.0
"""For each thing that is waited for."""
MORE = 10
"""Updates of the resumed trainer."""


def ip(*words: object) -> None:
    """Run iproute2's command."""
    subprocess.run(["ip", *map(str, words)], check=True)


def address(number: int) -> str:
    """Return a machine's address."""
    return f"10.7.0.{number + 1}"


def in_machine(number: int, *words: object) -> list[str]:
    """Return a command that runs another one on a machine."""
    return ["ip", "netns", "exec", f"{PREFIX}{number}", *map(str, words)]


def has_netem() -> bool:
    """Return whether the kernel can delay packets."""
    add = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    tried = subprocess.run(["ip", "netns", "exec", SWITCH, *add], stderr=subprocess.DEVNULL)
    return tried.returncode == 0


def shape(namespace: str, device: str, netem: bool) -> None:
    """Limit what leaves a device to ``RATE``; with netem, ``DELAY_MS`` late."""
    tbf = ("tbf", "rate", RATE, "burst", "64kb", "latency", "50ms")
    kind = ("netem", "delay", f"{DELAY_MS}ms", "rate", RATE) if netem else tbf
    command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", *kind]
    subprocess.run(command, check=True)


def lay_cable(port: str, end: str, closing: ExitStack) -> None:
    """Make two devices in the switch's namespace with a cable of ``DELAY_MS`` between them."""
    words = [sys.executable, Path(__file__).with_name("cable.py"), port, end, DELAY_MS]
    command = ["ip", "netns", "exec", SWITCH, *map(str, words)]
    cable = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    closing.callback(cable.wait)
    closing.callback(cable.kill)
    assert cable.stdout is not None
    assert cable.stdout.readline() == "ready\n", "no cable"


@contextmanager
def machines(count: int) -> Iterator[str]:
    """Have machines with a switch between them; yield what delays packets."""
    names = [SWITCH, *(f"{PREFIX}{number}" for number in range(count))]
    with ExitStack() as closing:
        for name in names:
            ip("netns", "add", name)
            closing.callback(ip, "netns", "del", name)
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        netem = has_netem()
        for number, name in enumerate(names[1:]):
            port, end = f"port{number}", f"end{number}"
            if netem:
                ip("-n", SWITCH, "link", "add", port, "type", "veth", "peer", "name", end)
            else:
                lay_cable(port, end, closing)
            ip("-n", SWITCH, "link", "set", end, "netns", name, "name", "eth0")
            ip("-n", SWITCH, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"{address(number)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            shape(name, "eth0", netem)
            shape(SWITCH, port, netem)
        yield "netem" if netem else "cable.py"


ROUND_TRIP = """
import socket, statistics, sys, time
def connect():
    started = time.perf_counter()
    socket.create_connection((sys.argv[1], int(sys.argv[2]))).close()
    return time.perf_counter() - started
print(1000 * statistics.median(connect() for _ in range(50)))
"""


def round_trip_ms(number: int) -> float:
    """Return the median time in which a machine connects to Redis: a round trip."""
    command = in_machine(number, sys.executable, "-c", ROUND_TRIP, address(0), PORT)
    return round(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout), 2)


def link_bytes(number: int) -> int:
    """Return what a machine has sent and received."""
    files = [f"/sys/class/net/eth0/statistics/{kind}_bytes" for kind in ("rx", "tx")]
    read = subprocess.run(in_machine(number, "cat", *files), check=True, capture_output=True, text=True)
    return sum(map(int, read.stdout.split()))


def until(condition: Callable[[], object], what: str) -> float:
    """Wait for a condition; return the seconds that it took."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > LIMIT_S:
            raise TimeoutError(f"{what}: not within {LIMIT_S:g} s")
        time.sleep(0.05)
    return time.monotonic() - started


class Run:
    """A run on machines: its trainer, who joined, and what they leave on disk and in Redis."""

    def __init__(self, place: Path, closing: ExitStack) -> None:
        self.place = place
        self.url = f"redis://{address(0)}:{PORT}/0/{STORE}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._closing = closing
        self._environment = os.environ | {PASSWORD: secrets.token_hex(16), "OMP_NUM_THREADS": "1"}
        (place / "config.yaml").write_text(CONFIG)

    def start(self, name: str, number: int, *words: object) -> subprocess.Popen[bytes]:
        """Start a command on a machine; its lines go to ``NAME.log``."""
        command = in_machine(number, *words)
        with (self.place / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.place
            )
        self._closing.callback(process.wait)
        self._closing.callback(process.kill)
        self.processes[name] = process
        return process

    def start_redis(self) -> redis.Redis:
        """Start the store; return a connection to it that needs no network."""
        socket = self.place / "redis.sock"
        options = ["--bind", address(0), "--port", PORT, "--unixsocket", socket, "--dir", self.place, "--save", ""]
        file = self.place / "redis.conf"  # a password is no argument, which other users see
        file.touch(mode=0o600)
        file.write_text(f"requirepass {self._environment[PASSWORD]}\nprotected-mode yes\n")
        self.start("redis", 0, "redis-server", file, *options)
        until(socket.exists, "Redis")
        self.redis = redis.Redis(unix_socket_path=str(socket), password=self._environment[PASSWORD])
        return self.redis

    def train(self) -> subprocess.Popen[bytes]:
        own = [f"store.url={self.url}", f"runner.output_dir={self.place / 'run'}", "runner.max_iterations=100000"]
        return self.start("trainer", 0, sys.executable, "-m", "embodrl", "train", "--config", "config.yaml", *own)

    def resume(self, updates: int) -> subprocess.Popen[bytes]:
        own = [self.place / "run", f"runner.max_iterations={updates}"]
        return self.start("trainer", 0, sys.executable, "-m", "embodrl", "resume", *own)

    def join(self, number: int) -> subprocess.Popen[bytes]:
        own = [f"store.collector=m{number}", "store.spool_dir=spool", f"env.train.total_num_envs={OWN_ROWS}"]
        return self.start(f"m{number}", number, sys.executable, "-m", "embodrl", "join", self.url, *own)

    def gathered(self, number: int) -> list[dict[str, float]]:
        """Return the metrics of a machine's rollouts so far."""
        files = list(self.place.glob(f"spool/*/m{number}/collect_metrics.jsonl"))
        lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def updates(self) -> list[dict[str, float]]:
        """Return the rows of all updates so far."""
        file = self.place / "run" / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines() if '"iteration"' in line]

    def says(self, number: int) -> list[str]:
        return (self.place / f"m{number}.log").read_text().splitlines()

    def more_from(self, number: int, count: int = 2) -> float:
        """Wait until a machine has made further rollouts; return the seconds to the first of them."""
        before, alive = len(self.gathered(number)), self.processes[f"m{number}"]
        started = time.monotonic()

        def made(wanted: int) -> bool:
            assert alive.poll() is None, "\n".join(self.says(number)[-20:])
            return len(self.gathered(number)) >= before + wanted

        until(lambda: made(1), f"a rollout of machine {number}")
        seconds = time.monotonic() - started
        until(lambda: made(count), f"{count} rollouts of machine {number}")
        return round(seconds, 2)


def cut(run: Run, number: int, seconds: float) -> dict[str, object]:
    """Take a machine's network for some seconds; return what happened."""
    before, said, updates = len(run.gathered(number)), len(run.says(number)), len(run.updates())
    ip("-n", SWITCH, "link", "set", f"port{number}", "down")
    time.sleep(seconds)
    during = len(run.gathered(number)) - before
    trained = len(run.updates()) - updates
    ip("-n", SWITCH, "link", "set", f"port{number}", "up")
    again = run.more_from(number)
    told = [line for line in run.says(number)[said:] if not line.startswith("rollout ")]
    return {
        "seconds": seconds,
        "rollouts_during": during,
        "updates_during": trained,
        "gathered_again_after_s": again,
        "said": [line[:200] for line in told][:8],
    }


def kill(run: Run, number: int) -> dict[str, object]:
    """Kill a joined process, and let it join again with its spool."""
    victim = run.processes[f"m{number}"]
    victim.kill()  # ip has become the process
    victim.wait()
    run.join(number)
    return {"joined_again_after_s": run.more_from(number)}


def leave(run: Run, number: int) -> dict[str, object]:
    """Let a joined process leave as it is asked to, and join again."""
    process, started = run.processes[f"m{number}"], time.monotonic()
    process.terminate()
    code, seconds = process.wait(LIMIT_S), round(time.monotonic() - started, 2)
    run.join(number)
    return {"exit_code": code, "left_after_s": seconds, "joined_again_after_s": run.more_from(number)}


def account(run: Run, count: int) -> dict[str, object]:
    """Return where each rollout is that was made."""
    checkpoint = CheckpointManager(run.place / "run", 1).latest_good()[0]
    assert checkpoint is not None
    state = checkpoint.state.fields("rollout").fields("state")
    ledger, rejected = Ledger.read(state.fields("ledger")), state.integer("rejected")
    names = {name.decode() for name in run.redis.smembers(f"{STORE}/{ROLLOUTS}/")}  # pyright: ignore
    spools = {path.name for path in run.place.glob("spool/*/*/m*-??????")}
    rows, lost, machine_rows = run.updates(), 0, {}
    counted = 0
    for number in range(1, count):
        name = f"m{number}"
        taken = {n for n in range(ledger.next.get(name, 0)) if ledger.has(name, n)}
        waiting = {n for one, n in map(place_of, names | spools) if one == name} - taken
        gathered = run.gathered(number)
        made = max([*taken, *waiting, *(int(row["iteration"]) - 1 for row in gathered)], default=-1) + 1
        lost += made - len(taken | waiting)
        counted += len(taken)
        machine_rows[name] = {
            "rollouts": made,
            "counted": len(taken),
            "waiting": len(waiting),
            "env_steps": len(taken) * STEPS,
            "episodes": sum(int(row["rollout/episodes"]) for row in gathered),
        }
    updates = len(rows) - 1
    # What was counted twice would be in updates, but only once in the ledger.
    used = updates * ROWS // OWN_ROWS
    return {
        "updates": updates,
        "env_steps": int(rows[-1]["env_steps"]),
        "machines": machine_rows,
        "duplicates": used + rejected - counted,
        "steps_differ": int(rows[-1]["env_steps"]) - counted * STEPS,
        "lost": lost,
        "rejected": rejected,
        "staleness_max": max(row["staleness/max"] for row in rows[1:]),
        "iterations_in_order": [int(row["iteration"]) for row in rows] == list(range(updates + 1)),
    }


def is_exact(row: dict[str, object]) -> bool:
    """Return whether nothing was lost, counted twice, or too old."""
    nothing = all(row[key] == 0 for key in ("duplicates", "lost", "steps_differ"))
    ended = all(code == 0 for code in row["exit_codes"].values())  # pyright: ignore
    return nothing and ended and float(str(row["staleness_max"])) <= 1 and bool(row["iterations_in_order"])


def try_setting(count: int, cut_s: float, place: Path) -> dict[str, object]:
    """Do it with so many machines; return a row."""
    started = time.monotonic()
    with machines(count) as delayed_by, ExitStack() as closing:
        run = Run(place, closing)
        run.start_redis()
        trip_ms = round_trip_ms(1)
        trainer = run.train()
        until(lambda: run.redis.exists(f"{STORE}/run/settings/STABLE") or trainer.poll() is not None, "the trainer")
        for number in range(1, count):
            run.join(number)
        for number in range(1, count):
            run.more_from(number)
        events: dict[str, object] = {"cut": cut(run, 1, cut_s), "kill": kill(run, 1), "leave": leave(run, count - 1)}
        trainer.terminate()
        events["trainer_stopped"] = trainer.wait(LIMIT_S)
        run.resume(int(run.updates()[-1]["iteration"]) + MORE)
        names = ["trainer", *(f"m{number}" for number in range(1, count))]
        codes = {name: run.processes[name].wait(LIMIT_S) for name in names}
        row = {"machines": count, "rate": RATE, "delay_ms": DELAY_MS, "delayed_by": delayed_by} | events
        row |= {"round_trip_ms": trip_ms}
        row |= {"exit_codes": codes, "trainer_link_bytes": link_bytes(0)}
        accounted = account(run, count)
        row |= {"wall_s": round(time.monotonic() - started, 1), "gathered": accounted.pop("machines")} | accounted
        return row | {"exact": is_exact(row)}


def main() -> int:
    """Do it with every number of machines; return 1 if something was lost, counted twice, or too old."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cut-s", type=float, nargs="+", default=[20.0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for count, cut_s in itertools.product(options.machines, options.cut_s):
        place = Path(tempfile.mkdtemp(prefix="embodrl-namespaces-"))
        rows.append(try_setting(count, cut_s, place))
        print(json.dumps(rows[-1]), flush=True)
        shutil.rmtree(place)
    if options.json:
        write_json_file(options.json, {"hardware": describe_hardware(), "rows": rows})
    return 0 if all(row["exact"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
