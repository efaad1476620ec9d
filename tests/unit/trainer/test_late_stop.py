"""A run that a late signal interrupts in any wait for a simulator is saved, and continues as if nothing had been."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from runs import TINY, metrics
from safetensors.torch import load_file

import embodrl
from embodrl.envs.pool.launch import ProcessLaunch
from embodrl.envs.pool.local import LocalLaunch
from embodrl.envs.pool.process import SimulatorProcess
from embodrl.envs.toy.env import ToyVectorEnv
from embodrl.processes.codec import decode, encode
from embodrl.processes.frames import Kind
from embodrl.runs.train import resume
from embodrl.trainer.stop import StopSignal

RESIDENT, OFFLOADED = "env.enable_offload=false", "env.enable_offload=true"
SETTINGS = {"max_iterations": 2, "eval_interval": 1, "save_interval": 1}


class Remembering(ToyVectorEnv):
    """A board whose dots drift by what was played since it was built, as a simulator that a reset does not clear."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.played = self.marked = 0

    def rebuild(self) -> None:
        self.played = self.marked = 0

    def mark(self) -> None:
        self.marked = self.played

    def rewind(self) -> None:
        self.played = self.marked

    def begin(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        self.played += 1
        super().begin(rows, seeds)
        self.position[rows, 0] += np.float32(0.01 * (self.played % 16))

    def chunk_step(self, *arguments: Any) -> Any:
        self.played += 1
        return super().chunk_step(*arguments)

    def get_state(self) -> bytes:
        return encode({"board": super().get_state(), "played": self.played, "marked": self.marked})

    def set_state(self, state: bytes) -> None:
        content = decode(state)
        super().set_state(content["board"])
        self.played, self.marked = content["played"], content["marked"]


class LateStop:
    """Counts the waits for simulators by what is waited for; interrupts the one called ``late``, as a stop does."""

    def __init__(self, late: str = "", asked: str = "") -> None:
        self.late, self.asked = late, asked
        self.waits = Counter[str]()
        self.stop: StopSignal | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def of(name: str, env_type: str, kwargs: dict[str, Any], **options: Any) -> LocalLaunch:
            return LocalLaunch(lambda: Remembering(**kwargs))

        receive, can_save = SimulatorProcess.receive, StopSignal.can_save

        def received(process: SimulatorProcess, kind: Kind, timeout_s: float, detail: str = "") -> Any:
            self.wait(detail or kind.name)
            return receive(process, kind, timeout_s, detail)

        def can_save_and_is_known(stop: StopSignal, hint: str) -> None:
            self.stop = stop
            can_save(stop, hint)

        monkeypatch.setattr(ProcessLaunch, "of", staticmethod(of))
        monkeypatch.setattr(SimulatorProcess, "receive", received)
        monkeypatch.setattr(StopSignal, "can_save", can_save_and_is_known)

    def wait(self, what: str) -> None:
        if self.stop is None:  # before the run
            return
        self.waits[what] += 1
        place = f"{what} {self.waits[what]}"
        if place in (self.asked, self.late):
            self.stop.number = signal.SIGTERM
        if place == self.late:
            self.stop.late = signal.SIGTERM
            raise SystemExit(128 + signal.SIGTERM)


def run(directory: Path, stop: LateStop, *settings: str) -> int:
    config: Any = yaml.safe_load(TINY)
    config["runner"] |= SETTINGS | {"logger": {"tensorboard": False, "console": "off"}}
    config["env"] |= {"num_processes": 2, "video": {"enabled": False}}
    config["env"]["eval"] |= {"decoding": "all", "num_episodes": 4}
    config["extensions"] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop.install(monkeypatch)
        if (directory / "config.yaml").exists():
            return resume(directory, [])
        return embodrl.train(config, [f"runner.output_dir={directory}", *settings]).exit_code


def result(directory: Path) -> tuple[object, ...]:
    """Return what two equal runs have in common: metrics, weights, and the simulators of the last checkpoint."""
    rows = [{name: row[name] for name in row if not name.startswith("memory/")} for row in metrics(directory)]
    last = directory / "checkpoints" / "step_2"
    weights = {name: tensor.numpy().tobytes() for name, tensor in load_file(last / "policy.safetensors").items()}
    saved = {path.name: path.read_bytes() for path in last.glob("env_*")}
    assert len(saved) == 2
    return rows, weights, saved


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[object, ...]]:
    """Results by setting."""
    found: dict[str, tuple[object, ...]] = {}
    for setting in (RESIDENT, OFFLOADED):
        directory = tmp_path_factory.mktemp("undisturbed") / "run"
        assert run(directory, LateStop(), setting) == 0
        found[setting] = result(directory)
    return found


@pytest.mark.parametrize(
    ("setting", "late", "asked"),
    [
        (RESIDENT, "rebuild 2", ""),  # before the first evaluation, in the second of two simulators
        pytest.param(RESIDENT, "set_auto_reset 1", "", marks=pytest.mark.long),
        pytest.param(RESIDENT, "RESET 1", "", marks=pytest.mark.long),
        pytest.param(RESIDENT, "rebuild 3", "", marks=pytest.mark.long),  # between two decodings
        pytest.param(RESIDENT, "rebuild 7", "", marks=pytest.mark.long),  # after the evaluation
        pytest.param(RESIDENT, "mark 3", "", marks=pytest.mark.long),  # before the first rollout
        (RESIDENT, "STEP 14", ""),  # in the first rollout
        (RESIDENT, "rewind 1", "STEP 14"),  # of a rollout that a stop in time has ended
        pytest.param(RESIDENT, "rebuild 9", "", marks=pytest.mark.long),  # before the second evaluation
        pytest.param(RESIDENT, "rebuild 13", "", marks=pytest.mark.long),  # before saving
        pytest.param(OFFLOADED, "GET_STATE 1", "", marks=pytest.mark.long),
        (OFFLOADED, "CLOSE 2", ""),
        pytest.param(OFFLOADED, "START 1", "", marks=pytest.mark.long),
        pytest.param(OFFLOADED, "SET_STATE 2", "", marks=pytest.mark.long),
    ],
)
def test_a_late_stop_in_any_wait_loses_nothing(
    undisturbed: dict[str, tuple[object, ...]], setting: str, late: str, asked: str, tmp_path: Path
) -> None:
    stop = LateStop(late, asked)
    assert run(tmp_path / "run", stop, setting) == 128 + signal.SIGTERM
    assert stop.stop is not None and stop.stop.late
    assert run(tmp_path / "run", LateStop()) == 0
    assert result(tmp_path / "run") == undisturbed[setting]
