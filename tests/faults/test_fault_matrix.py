"""Every fault in every simulator; tests/helpers/env_cases.py says which are skipped.

Two processes with two environments each. The fault is in the second, whose episodes end and are counted; the first
continues as if nothing had happened.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from env_cases import CASES, Case, interpreter, started
from expect import raises_code

from embodrl.envs.pool.options import EnvTimeouts
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EnvRaised, EnvTimeout, EnvWorkerDied
from embodrl.specs import ENVS
from embodrl.types import EnvStep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MATRIX = ("toy", "maniskill", "Reacher-v5", "metaworld", "libero")
ON_MUJOCO = ("Reacher-v5", "metaworld", "libero")
WITH_MESHES = ("maniskill", "metaworld", "libero")
CHUNK, LIMIT, SHORT_S = 3, 50, 1.5
PATIENT = {"start_s": 600.0, "reset_s": 600.0, "step_s": 600.0, "heartbeat_s": 60.0}
SEEDS, TASKS = np.array([31, 32, 33, 34]), np.zeros(4, np.int32)
HIT = np.array([False, False, True, True])
"""Rows of the second process."""
LOSSES = {
    "none": "nothing",
    "kill": "dies",
    "kill during": "dies",
    "crash": "dies",
    "stop": "hangs",
    "hang in step": "hangs",
    "raise in step": "raises",
    "picture is not a picture": "raises",
    "reward is not a number": "cannot be true",
    "state out of bounds": "cannot be true",
    "slow start": "starts slowly",
}
"""Fault -> what becomes of its process."""
FROM_OUTSIDE = ("none", "kill", "kill during", "stop", "slow start")
COMBINATIONS = (  # in the first process, in the second
    ("kill", "none"),
    ("none", "stop"),
    ("raise in step", "none"),
    ("none", "reward is not a number"),
    ("slow start", "none"),
    ("crash", "hang in step"),
    ("picture is not a picture", "kill"),
    ("kill during", "state out of bounds"),
    ("slow start", "crash"),
    ("stop", "raise in step"),
    ("reward is not a number", "stop"),
    ("hang in step", "slow start"),
    ("raise in step", "state out of bounds"),
    ("slow start", "picture is not a picture"),
    ("state out of bounds", "slow start"),
    ("kill", "kill during"),
    ("stop", "hang in step"),
    ("raise in step", "picture is not a picture"),
    ("state out of bounds", "reward is not a number"),
    ("slow start", "slow start"),
)


class Impatient:
    """Timeouts, one of a kind short: the first, or the second of ``reset_s``, as sending a request takes the first.

    What follows removes the file that keeps processes from coming up.
    """

    def __init__(self, kind: str, slow_start: Path | None = None) -> None:
        self._kind, self._slow_start, self._reads = kind, slow_start, 0
        self._short = 2 if kind == "reset_s" else 1

    def __getattr__(self, name: str) -> float:
        self._reads += name == self._kind
        if name == self._kind and self._reads == self._short:
            return SHORT_S
        if name == self._kind and self._slow_start is not None:
            self._slow_start.unlink(missing_ok=True)
        return PATIENT[name]


def make_pool(case: Case, folder: Path, environ: dict[str, str] | None = None) -> EnvPool:
    """Return two processes with two environments of one task each; ``folder/RANK`` keeps one from coming up."""
    kwargs = {**case.kwargs, "tasks": case.kwargs["tasks"][:1], "max_episode_steps": LIMIT, "include_state": True}
    # An interpreter of its own does not know what this one has registered, so embodrl sends the target.
    target = ENVS.entry(case.env_type).target
    return EnvPool.create(
        "broken",
        {**kwargs, "env_type": target if isinstance(target, str) else case.env_type, "max_chunk": CHUNK},
        shard_kwargs=[{"slow_start": str(folder / str(rank))} for rank in range(2)],
        total_num_envs=4,
        num_processes=2,
        max_restarts=1000,
        python=interpreter(case),
        extensions=["broken_simulators", *case.extensions],
        timeouts=EnvTimeouts(**PATIENT),
        environ=environ,
        name="train",
    )


@pytest.fixture(scope="module", params=MATRIX)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def shared(case: Case, folder: Path) -> Iterator[EnvPool]:
    with started(make_pool(case, folder)) as pool:
        yield pool


@pytest.fixture
def pool(shared: EnvPool) -> Iterator[EnvPool]:
    """A pool in the middle of its episodes; the first process is the same in the end."""
    shared.reset(SEEDS, TASKS)
    assert shared.step(actions(shared)).valid.all()
    pid, lost = shared.managers[0].pid, shared.faults.lost_episodes
    yield shared
    assert shared.managers[0].pid == pid
    assert shared.faults.lost_episodes == lost + 2, "its episodes are counted once each"
    assert shared.step(actions(shared)).valid.all()


def actions(pool: EnvPool, seed: int = 0) -> np.ndarray:
    shape = (4, CHUNK, pool.spec.action_dim)
    return np.random.default_rng(seed).uniform(-0.3, 0.3, shape).astype(np.float32)


def check_lost(pool: EnvPool, step: EnvStep, restarts: int, hit: np.ndarray = HIT) -> None:
    """Check that only the episodes of ``hit`` have ended, as not valid, with nothing broken in the result."""
    np.testing.assert_array_equal(step.valid.all(axis=1), ~hit)
    np.testing.assert_array_equal(step.valid.any(axis=1), ~hit)
    np.testing.assert_array_equal(step.truncated[:, 0], hit)
    assert not step.terminated.any() and not step.success[hit].any() and not step.reward[hit].any()
    np.testing.assert_array_equal(step.final_mask, hit)
    for observation in (step.observation, step.final_observation):
        assert observation is not None and observation.images[HIT].any()
        assert (np.abs(observation.state[HIT]) < 1e6).all()
    assert (np.abs(step.reward) < 1e6).all()
    assert pool.faults.restarts == restarts


def kill(pool: EnvPool, number: int, rank: int = 1) -> None:
    """Send a signal to a process, unless it has been found dead already."""
    pid = pool.managers[rank].pid
    if pid is not None:
        os.kill(pid, number)


def test_killed_in_the_middle_of_a_step(pool: EnvPool) -> None:
    before = pool.faults.restarts
    kill(pool, signal.SIGSTOP)  # so that it does not end the chunk before it is killed
    pool.step_async(actions(pool))
    kill(pool, signal.SIGKILL)
    check_lost(pool, pool.wait(copy=True), before + 1)


def test_killed_between_two_steps(pool: EnvPool) -> None:
    before = pool.faults.restarts
    kill(pool, signal.SIGKILL)
    check_lost(pool, pool.step(actions(pool), copy=True), before + 1)


def test_stopped(pool: EnvPool) -> None:
    before = pool.faults.restarts
    kill(pool, signal.SIGSTOP)
    pool.managers[1].timeouts = Impatient("step_s")  # type: ignore[assignment]
    check_lost(pool, pool.step(actions(pool), copy=True), before + 1)


def test_a_start_that_takes_too_long_after_a_death(pool: EnvPool, folder: Path) -> None:
    before = pool.faults.restarts
    (folder / "1").touch()
    kill(pool, signal.SIGKILL)
    pool.managers[1].timeouts = Impatient("start_s", folder / "1")  # type: ignore[assignment]
    check_lost(pool, pool.step(actions(pool), copy=True), before + 2)


@pytest.mark.parametrize(
    "fault",
    ["raise in step", "crash", "hang in step", "picture is not a picture", "sends noise", "sends memory that shrinks"],
)
def test_a_simulator_that_fails_in_a_step(pool: EnvPool, fault: str) -> None:
    before = pool.faults.restarts
    pool.call_one(1, "break_next", {"fault": fault})
    if fault == "hang in step":
        pool.managers[1].timeouts = Impatient("step_s")  # type: ignore[assignment]
    check_lost(pool, pool.step(actions(pool), copy=True), before + 1)


@pytest.mark.parametrize(
    "fault", ["raise in reset", "crash in reset", "hang in reset", "state is not a number in reset"]
)
def test_a_simulator_that_fails_in_a_reset(shared: EnvPool, fault: str) -> None:
    first = shared.reset(SEEDS, TASKS, copy=True)
    before, lost = shared.faults.restarts, shared.faults.lost_episodes
    shared.call_one(1, "break_next", {"fault": fault})
    if fault == "hang in reset":
        shared.managers[1].timeouts = Impatient("reset_s")  # type: ignore[assignment]
    again = shared.reset(SEEDS, TASKS, copy=True)
    np.testing.assert_array_equal(again.images[HIT], first.images[HIT])
    assert np.isfinite(again.state).all()
    assert (shared.faults.restarts, shared.faults.lost_episodes) == (before + 1, lost)
    assert shared.step(actions(shared)).valid.all()


@pytest.mark.parametrize(
    "fault",
    [
        "reward is not a number",
        "reward is infinite",
        "reward out of bounds",
        "state is not a number",
        "state out of bounds",
        "diverges",
    ],
)
def test_a_number_that_cannot_be_true_ends_one_episode(case: Case, shared: EnvPool, fault: str) -> None:
    if fault == "diverges" and case not in [CASES[name] for name in ON_MUJOCO]:
        pytest.skip("not on MuJoCo")
    first = shared.reset(SEEDS, TASKS, copy=True)
    before, quarantined, lost = shared.faults.restarts, shared.faults.quarantined, shared.faults.lost_episodes
    shared.step(actions(shared))
    shared.call_one(1, "break_next", {"fault": fault})
    hit = np.array([False, False, False, True])
    step = shared.step(actions(shared), copy=True)
    check_lost(shared, step, before, hit)
    assert (shared.faults.quarantined, shared.faults.lost_episodes) == (quarantined + 1, lost + 1)
    np.testing.assert_array_equal(step.observation.state[hit], first.state[hit])  # its seed again
    assert shared.step(actions(shared)).valid.all()


def test_the_limit_of_restarts_stops_with_all_that_is_known(case: Case, shared: EnvPool) -> None:
    shared.reset(SEEDS, TASKS)
    strict = EnvPool(shared.managers, max_restarts=0)
    assert strict.spec == shared.spec
    strict.reset(SEEDS, TASKS)
    strict.call_one(1, "break_next", {"fault": "crash"})
    with raises_code("env-worker-died", EnvWorkerDied, "0") as stopped:
        strict.step(actions(strict))
    message = str(stopped.value)
    for words in ("rank 1 of 2", "'train/1'", "envs 2-3", case.kwargs["tasks"][0], "seeds 33, 34", "during STEP"):
        assert words in message
    for words in ("SIGSEGV", "lost the device", "Fatal Python error", "broken_simulators.py"):
        assert words in message  # its last words, and the interpreter's dump of the stack


def set_up(pool: EnvPool, rank: int, fault: str, folder: Path) -> list[bool]:
    """Let a process fail with the next chunk; return which of its two episodes that is certain to end."""
    manager = pool.managers[rank]
    manager.timeouts = EnvTimeouts(**PATIENT)
    hit = [fault not in ("none", "kill during")] * 2  # which may come after the end of the chunk
    if fault not in FROM_OUTSIDE:
        try:
            pool.call_one(rank, "break_next", {"fault": fault})
            hit[0] = LOSSES[fault] != "cannot be true"
        except EnvWorkerDied:
            return hit  # killed after the end of the last chunk
    if fault == "slow start":
        (folder / str(rank)).touch()
        manager.timeouts = Impatient("start_s", folder / str(rank))  # type: ignore[assignment]
    if fault in ("kill", "slow start"):
        kill(pool, signal.SIGKILL, rank)
    elif fault == "stop":
        kill(pool, signal.SIGSTOP, rank)
    if LOSSES[fault] == "hangs":
        manager.timeouts = Impatient("step_s")  # type: ignore[assignment]
    return hit


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_faults_in_both_processes_at_once_neither_hang_nor_break_anything(
    case: Case, shared: EnvPool, folder: Path
) -> None:
    """A fault in a process, in both or in none, before each chunk; what is left is whole, and every loss is counted."""
    if shared.managers[1].pid is None:  # left dead by the limit of restarts
        shared.managers[1].restart()
    dice = random.Random(7)
    at_random = tuple((dice.choice([*LOSSES]), dice.choice([*LOSSES])) for _ in range(20))
    rounds = at_random if case.env_type == "toy" else COMBINATIONS
    shared.reset(SEEDS, TASKS)
    for number, faults in enumerate(rounds):
        lost = shared.faults.lost_episodes
        hit = np.array([row for rank, fault in enumerate(faults) for row in set_up(shared, rank, fault, folder)])
        shared.step_async(actions(shared, number))
        for rank in (rank for rank, fault in enumerate(faults) if fault == "kill during"):
            kill(shared, signal.SIGKILL, rank)
        step = shared.wait(copy=True)
        gone = step.truncated[:, 0] & ~step.valid.any(axis=1)
        assert (gone >= hit).all(), faults
        assert shared.faults.lost_episodes == lost + gone.sum(), faults
        assert not step.reward[gone].any() and not step.valid[gone].any(), faults
        assert (np.abs(step.reward) < 1e6).all() and (np.abs(step.observation.state) < 1e6).all(), faults
        assert step.observation.images.any(axis=(1, 2, 3, 4)).all(), faults
    for manager in shared.managers:
        manager.timeouts = EnvTimeouts(**PATIENT)
    shared.reset(SEEDS, TASKS)  # what was killed after its last chunk
    assert shared.step(actions(shared)).valid.all()


def test_the_combinations_hold_every_fault_in_either_process_and_every_mixture_of_losses() -> None:
    assert set(LOSSES) == {first for first, _ in COMBINATIONS} == {second for _, second in COMBINATIONS}
    found = {frozenset(LOSSES[fault] for fault in faults) for faults in COMBINATIONS}
    losses = set(LOSSES.values())
    assert found == {frozenset((left, right)) for left in losses for right in losses} - {frozenset({"nothing"})}


@pytest.mark.parametrize("name", MATRIX)
def test_full_dev_shm_is_harmless(name: str) -> None:
    """The memory of a process has no name and is not there; a driver that wants it there would fail the same way."""
    interpreter(CASES[name])
    mount = "mount -t tmpfs -o size=8k tmpfs /dev/shm && ! head -c 64k /dev/zero > /dev/shm/full 2>/dev/null"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    command = f'{mount}; exec "$0" "$@"'
    script = str(Path(__file__).with_name("full_shm.py"))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, sys.executable, script, name],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 bytes free, played" in done.stdout


@pytest.mark.parametrize("name", WITH_MESHES)
def test_a_damaged_mesh_cache_is_made_again(name: str, tmp_path: Path) -> None:
    case, environ = CASES[name], {"XDG_CACHE_HOME": str(tmp_path)}

    def pictures() -> np.ndarray:
        with started(make_pool(case, tmp_path, environ)) as pool:  # both processes at once
            return pool.reset(SEEDS, TASKS).images.copy()

    fresh = pictures()
    files = sorted((tmp_path / "embodrl" / "meshes").iterdir())
    sound = [file.read_bytes() for file in files]
    assert files and all(file.suffix == ".mesh" for file in files), "nothing half-written is left"
    damages: list[Any] = [lambda c: c[: len(c) // 2], lambda c: b"", lambda c: c[:-1] + bytes([c[-1] ^ 1]), lambda c: c]
    for index, (file, content) in enumerate(zip(files, sound, strict=True)):
        file.write_bytes(damages[index % len(damages)](content))
    np.testing.assert_array_equal(pictures(), fresh)
    assert [file.read_bytes() for file in files] == sound
    np.testing.assert_array_equal(pictures(), fresh)  # read, not computed


def test_the_memory_of_a_process_that_cannot_be_had_is_reported(tmp_path: Path) -> None:
    extension = tmp_path / "little_memory.py"
    extension.write_text(
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n"
    )
    options = {"extensions": ["little_memory"], "environ": {"PYTHONPATH": str(tmp_path)}}
    pool = EnvPool.create("toy", {"image_size": 64}, total_num_envs=2, num_processes=1, **options)
    with raises_code("shared-memory", EnvRaised) as refused, pool:
        pass
    assert "fewer or smaller environments" in refused.value.hint


def test_a_first_start_that_takes_too_long_stops_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "1").touch()
    pool = make_pool(CASES["toy"], tmp_path)
    pool.managers[1].timeouts = Impatient("start_s")  # type: ignore[assignment]
    with (
        raises_code("env-timeout", EnvTimeout, "train/1", "1.5", "START") as slow,
        pool,
    ):
        pass
    assert "env.{start,reset,step}_timeout_s" in slow.value.hint
    assert all(manager.pid is None for manager in pool.managers)
