"""Environment steps per second of every installed simulator: an EnvPool and the simulator's own vectorisation.

Both sides run random actions in the same task with one camera of the same size, on the same cores, in turns, block by
block. The other side draws at every step; we are measured so, and as training does it: once per chunk of five actions.
It has a process per environment, we have a process per core. Both draw with one thread per process, the best for both.

Steps per second of processor time are given with those of wall time, as a busy machine disturbs them less.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import psutil
from hardware import describe_hardware
from rich.console import Console
from rich.table import Table

from embodrl.config.isolated import interpreter_of
from embodrl.config.schema import Config
from embodrl.envs.maniskill.spec import ManiSkillConfig
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EmbodrlError, MissingDependencyError, UsageError
from embodrl.pipelines.load import load_config
from embodrl.specs import ENVS
from embodrl.storage.json_file import write_json_result
from embodrl.workers.env import check_simulator, make_pool

SIZES = (64, 224)
NUM_ENVS = (1, 4, 16)
FULL_DETAIL_NUM_ENVS = (4,)
"""With as many environments we are measured with MuJoCo's own meshes, shadows and anti-aliasing, too."""
CHUNK = 5
ROUNDS = 3
BLOCK_S = 0.5
TIMEOUT_S = 900.0
MAX_BLOCK_STEPS = 200
EVERY_STEP = "drawn every step"
ONCE_A_CHUNK = "drawn once a chunk"
FULL_DETAIL = "drawn every step, full detail"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "1", "SAPIEN_DISABLE_RAY_TRACING": "1"}


@dataclass(frozen=True)
class Case:
    """A simulator and how it is measured.

    Attributes:
        overrides: of the configuration, beside the size of the camera.
        stock: what the simulator brings.
        max_episode_steps: so many that no block meets the end of an episode, where the simulator lets one.
        full_detail: keyword arguments of the VectorEnv that draw what the simulator itself draws; none for ManiSkill,
            which ``bench.py render`` looks at.
    """

    overrides: tuple[str, ...]
    stock: str
    max_episode_steps: int = 100_000
    full_detail: dict[str, Any] = field(default_factory=lambda: {"render_detail": "full"})


def libero_task() -> str:
    """Return the first task of libero_spatial."""
    return next(iter(ENVS.entry("libero").suites["libero_spatial"].tasks))


CASES = {
    "maniskill": Case(("env=maniskill",), "AsyncVectorEnv of ManiSkill's CPUGymWrapper", full_detail={}),
    "metaworld": Case(("env=metaworld",), "AsyncVectorEnv", 500),  # where its own episodes end
    "gymnasium": Case(("env=gymnasium_reacher",), "AsyncVectorEnv"),
    "libero": Case(("env=libero", f"env.tasks=[{libero_task()}]"), "LIBERO's SubprocVectorEnv"),
}


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the processor time that processes have taken."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


class Side:
    """What is measured.

    Args:
        advance: runs that many times ``unit`` steps of the whole batch.
        unit: see ``advance``.
        num_envs: B.
        processes: whose processor time counts.
    """

    def __init__(
        self, advance: Callable[[int], object], unit: int, num_envs: int, processes: Sequence[psutil.Process]
    ) -> None:
        self.advance = advance
        self.unit = unit
        self.num_envs = num_envs
        self.processes = processes
        self.block = 1
        self.wall_s = self.cpu_s = 0.0
        self.steps = 0

    def prepare(self) -> None:
        """Warm up and find how much work takes ``BLOCK_S``."""
        self.advance(1)
        start = time.perf_counter()
        self.advance(2)
        each_s = (time.perf_counter() - start) / 2
        self.block = int(np.clip(round(BLOCK_S / each_s), 1, max(MAX_BLOCK_STEPS // self.unit, 1)))

    def measure(self) -> None:
        """Run a block."""
        cpu = cpu_seconds(self.processes)
        start = time.perf_counter()
        self.advance(self.block)
        self.wall_s += time.perf_counter() - start
        self.cpu_s += cpu_seconds(self.processes) - cpu
        self.steps += self.block * self.unit * self.num_envs

    def figures(self) -> dict[str, float]:
        """Return environment steps per second: of the clock, and of processor time."""
        return {
            "steps_per_s": round(self.steps / self.wall_s, 1),
            "steps_per_cpu_s": round(self.steps / max(self.cpu_s, 0.01), 1),
        }


@contextmanager
def stock_side(options: dict[str, Any], python: str) -> Iterator[Side]:
    """Start ``stock_envs.py`` in the simulator's interpreter.

    Raises:
        EmbodrlError: it ends too early.
    """
    script = Path(__file__).with_name("stock_envs.py")
    with (
        TemporaryFile("w+") as errors,
        subprocess.Popen(
            [python, str(script), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | ONE_THREAD,
        ) as process,
    ):
        stdin = process.stdin
        stdout = process.stdout
        assert stdin is not None and stdout is not None

        def until(word: str) -> None:
            if stdout.readline().strip() != word:
                errors.seek(0)
                last = (errors.read().strip().splitlines() or ["no message"])[-1]
                raise EmbodrlError(
                    f"the vectorisation of {options['env']} ended before '{word}': {last}", code="bench-env-failed"
                )

        def advance(steps: int) -> None:
            stdin.write(f"{steps}\n")
            stdin.flush()
            until("done")

        family: list[psutil.Process] = []
        try:
            until("ready")
            parent = psutil.Process(process.pid)
            family = [parent, *parent.children(recursive=True)]
            yield Side(advance, 1, options["num_envs"], family)
        finally:
            process.kill()
            for each in family[1:]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()


def our_side(pool: EnvPool, chunk: int) -> Side:
    """Return a side that runs chunks in a pool that has started."""
    num_envs = pool.spec.num_envs
    action_dim = pool.spec.action_dim
    rng = np.random.default_rng(0)

    def advance(chunks: int) -> None:
        for _ in range(chunks):
            pool.step(rng.uniform(-1, 1, (num_envs, chunk, action_dim)).astype(np.float32))

    simulators = [psutil.Process(manager.pid) for manager in pool.managers if manager.pid is not None]
    return Side(advance, chunk, num_envs, [psutil.Process(), *simulators])


def begin_pool(config: Config, case: Case, num_envs: int, **overrides: Any) -> EnvPool:
    """Return a pool with a process per core, which is starting."""
    processes = min(num_envs, len(os.sched_getaffinity(0)))
    config = config.model_copy(update={"env": config.env.model_copy(update={"num_processes": processes})})
    limits = {"ignore_terminations": True, "max_episode_steps": case.max_episode_steps, "max_chunk": CHUNK}
    pool = make_pool(config, num_envs, **limits, **overrides)
    pool.start_async()
    return pool


def stock_options(config: Config, case: Case, num_envs: int) -> dict[str, Any]:
    """Return the options of ``stock_envs.py``."""
    env = config.env
    options: dict[str, Any] = {
        "env": env.env_type,
        "task": env.tasks[0],
        "num_envs": num_envs,
        "size": env.cameras[0].height,
        "max_episode_steps": case.max_episode_steps,
    }
    if isinstance(env, ManiSkillConfig):
        from embodrl.envs.maniskill.rendering import render_device_name

        return options | {"device": render_device_name(env.render_backend)}
    own = env.model_dump()
    named = {"id": own.get("id"), "suite": own.get("suite"), "assets": own.get("libero_assets")}
    return options | named | {"camera": env.cameras[0].name}


def measure(config: Config, case: Case, num_envs: int) -> list[dict[str, Any]]:
    """Measure all sides with as many environments, in turns; return a row a side, the stock one first."""
    python = interpreter_of(config) or sys.executable
    variants: list[dict[str, Any]] = [{}]
    if num_envs in FULL_DETAIL_NUM_ENVS and case.full_detail:
        variants.append(case.full_detail)
    with ExitStack() as stack:
        pools = [stack.enter_context(closing(begin_pool(config, case, num_envs, **each))) for each in variants]
        stock = stack.enter_context(stock_side(stock_options(config, case, num_envs), python))
        for pool in pools:
            pool.wait_started()
            pool.reset(np.arange(num_envs), np.zeros(num_envs, np.int32))
        sides = {case.stock: stock, EVERY_STEP: our_side(pools[0], 1), ONCE_A_CHUNK: our_side(pools[0], CHUNK)}
        if len(pools) > 1:
            sides[FULL_DETAIL] = our_side(pools[1], 1)
        for side in sides.values():
            side.prepare()
        for _ in range(ROUNDS):
            for side in sides.values():
                side.measure()
    base = stock.figures()
    rows: list[dict[str, Any]] = []
    for name, side in sides.items():
        figures = side.figures()
        ratios = {
            "ratio": round(figures["steps_per_s"] / base["steps_per_s"], 2),
            "cpu_ratio": round(figures["steps_per_cpu_s"] / base["steps_per_cpu_s"], 2),
        }
        what = name if side is stock else f"embodrl, {name}"
        rows.append({"size": config.env.cameras[0].height, "num_envs": num_envs, "what": what, **figures, **ratios})
    return rows


def configure(name: str, size: int, settings: Sequence[str] = ()) -> Config:
    """Return the configuration of a case, with one camera of that size and the task's own view."""
    config = load_config([*CASES[name].overrides, *settings]).config
    camera = config.env.cameras[0].model_copy(update={"height": size, "width": size, "fov_rad": None})
    patience = dict.fromkeys(("start_timeout_s", "reset_timeout_s", "step_timeout_s"), TIMEOUT_S)
    return config.model_copy(update={"env": config.env.model_copy(update={"cameras": (camera,), **patience})})


def smallest(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return size -> the smallest ratio of what is drawn at every step, as the other side draws."""
    same = [row for row in rows if row["what"].endswith(EVERY_STEP)]
    return {str(size): min(row["ratio"] for row in same if row["size"] == size) for size in {r["size"] for r in same}}


def run(
    names: Sequence[str] = tuple(CASES),
    sizes: Sequence[int] = SIZES,
    numbers: Sequence[int] = NUM_ENVS,
    tell: Callable[[str], object] = lambda text: None,
    keep: Callable[[dict[str, Any]], object] = lambda result: None,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure and return the figures.

    Args:
        names: simulators; those that this machine lacks are left out, which ``left_out`` says.
        sizes: height and width of the pictures.
        numbers: of environments.
        tell: gets a line before each measurement.
        keep: gets the figures so far after each measurement.
        settings: of the configuration, ``env.python=...`` say; they go to all simulators.
    """
    result: dict[str, Any] = {"hardware": describe_hardware(), "chunk": CHUNK, "envs": {}, "left_out": {}}
    for name in names:
        rows: list[dict[str, Any]] = []
        try:
            check_simulator(configure(name, sizes[0], settings))
            if name == "maniskill" and find_spec("sapien") is None:  # tells which device the other side draws with
                raise MissingDependencyError("sapien is not in this interpreter", "pip install 'embodrl[maniskill]'")
        except MissingDependencyError as error:
            result["left_out"][name] = f"{error.message}: {error.hint}"
            continue
        for size in sizes:
            config = configure(name, size, settings)
            for number in numbers:
                tell(f"{name}, {size} x {size}, {number} environments")
                rows += measure(config, CASES[name], number)
                result["envs"][name] = {"task": config.env.tasks[0], "smallest_ratio": smallest(rows), "rows": rows}
                keep(result)
    return result


def main(json_path: Path | None = None, env: Sequence[str] | None = None, settings: Sequence[str] = ()) -> int:
    """Measure, show a table, and write JSON if asked; return 0. ``env`` None takes all; for ``settings`` see ``run``.

    Raises:
        UsageError: no such simulator is measured.
    """
    if unknown := [name for name in env or () if name not in CASES]:
        raise UsageError(f"--env {unknown[0]} is not measured; known: {', '.join(CASES)}", "choose one of these")
    console = Console()

    def keep(result: dict[str, Any]) -> None:
        if json_path is not None:
            write_json_result(json_path, result)

    result = run(tuple(env or CASES), tell=lambda text: Console(stderr=True).print(text), keep=keep, settings=settings)
    for name, reason in result["left_out"].items():
        console.print(f"{name} is left out: {reason}")
    for name, figures in result["envs"].items():
        table = Table(title=f"{name}, {figures['task']}: environment steps per second")
        for column in ("pixels", "environments", "what", "steps/s", "ratio", "of processor time"):
            table.add_column(column, justify="left" if column == "what" else "right")
        for row in figures["rows"]:
            table.add_row(*(str(row[key]) for key in ("size", "num_envs", "what", "steps_per_s", "ratio", "cpu_ratio")))
        console.print(table)
    keep(result)
    return 0
