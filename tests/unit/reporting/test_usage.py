"""Metrics of what a run uses of its machine, and how they are shown."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console as RichConsole

from embodrl.config import load_config
from embodrl.processes import traffic
from embodrl.processes.traffic import Traffic
from embodrl.processes.tree import Use
from embodrl.reporting import usage
from embodrl.reporting.console import Console
from embodrl.reporting.report import report_page
from embodrl.reporting.rows import is_measured
from embodrl.reporting.usage import GIB, MIB, GpuSampler, Parallel, UsageMonitor, idle_shares, sampler_of, used_gpus
from embodrl.reporting.usage_text import usage_table, usage_text

TIMES = {"time/env_s": 2.0, "time/policy_s": 1.0, "time/train_s": 4.0, "time/total_s": 10.0}


class NVMLError(Exception):
    """Of the fake driver."""


class FakeNvml:
    """Two GPUs whose figures are read one after the other; None fails."""

    NVMLError = NVMLError

    def __init__(self, *figures: dict[str, list[tuple[int, int] | None]]) -> None:
        self.figures: dict[str, list[tuple[int, int] | None]] = figures[0] if figures else {}
        self.now: dict[str, tuple[int, int]] = {}
        self.calls: list[str] = []
        self.sampled = threading.Event()

    def nvmlInit(self) -> None:
        self.calls.append("init")
        if not self.figures:
            raise NVMLError("no driver")

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return str(index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        found = self.figures[handle].pop(0)
        if found is None:
            raise NVMLError("not supported")
        self.now[handle] = found
        return SimpleNamespace(gpu=found[0])

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self.sampled.set()
        return SimpleNamespace(used=self.now[handle][1])


def test_idle_shares_leave_out_the_evaluation() -> None:
    shares = {"usage/idle_env": 0.8, "usage/idle_rollout": 0.9, "usage/idle_actor": 0.6}
    assert idle_shares(TIMES, Parallel()) == pytest.approx(shares)
    evaluated = TIMES | {"time/total_s": 30.0, "time/eval_s": 20.0}
    assert idle_shares(evaluated, Parallel()) == pytest.approx(shares)


def test_idle_shares_of_groups_that_work_at_once_are_means_within_0_and_1() -> None:
    busy = TIMES | {"time/env_s": 16.0, "time/policy_s": 12.0, "time/train_s": 10.5}
    assert idle_shares(busy, Parallel(env=2)) == pytest.approx(
        {"usage/idle_env": 0.2, "usage/idle_rollout": 0.0, "usage/idle_actor": 0.0}
    )
    assert idle_shares(busy, Parallel(4, 4))["usage/idle_rollout"] == pytest.approx(0.7)


def test_idle_shares_need_times() -> None:
    assert idle_shares({"time/total_s": 3.0, "time/env_s": None, "time/train_s": 0.0}, Parallel()) == {
        "usage/idle_actor": 1.0
    }
    assert idle_shares({"time/env_s": 1.0}, Parallel()) == {}


@pytest.mark.parametrize(
    ("settings", "parallel"),
    [
        (["rollout.pipeline_stages=2"], Parallel()),
        (["rollout.pipeline_stages=2", "runner.max_staleness=1"], Parallel(2, 1)),
        (
            ["runner.max_staleness=1", "cluster.component_placement={actor:0,rollout:'0:0-1',env:0}"],
            Parallel(2, 2),
        ),
    ],
)
def test_only_asynchronous_groups_work_at_once(settings: list[str], parallel: Parallel) -> None:
    loaded = load_config(["env=toy", *settings])
    assert Parallel.of_run(loaded.config, loaded.deployment) == parallel


def test_cores_memory_and_bytes_are_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([100.0, 104.0])
    totals = iter([{"env": Traffic(5 * MIB, 0)}, {"env": Traffic(7 * MIB, MIB), "evaluation": Traffic(0, 3 * MIB)}])
    uses = {"main": Use(2.0, GIB), "env": Use(6.0, 3 * GIB)}
    monkeypatch.setattr(usage.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(usage, "totals", lambda: next(totals))
    monkeypatch.setattr(usage, "ProcessTree", lambda: SimpleNamespace(look=lambda: uses))
    row = UsageMonitor().take({})
    assert row == {
        "usage/cores_env": 1.5,
        "usage/cores_main": 0.5,
        "usage/memory_env_gib": 3.0,
        "usage/memory_main_gib": 1.0,
        "usage/sent_env_mib": 2.0,
        "usage/received_env_mib": 1.0,
        "usage/sent_eval_mib": 0.0,
        "usage/received_eval_mib": 3.0,
    }
    assert all(map(is_measured, row)) and is_measured("time/total_s") and not is_measured("train/lr")


def test_shared_memory_counts_once_it_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "_LINKS", traffic._Links())
    monitor = UsageMonitor()
    assert "usage/shared_mib" not in monitor.take({})
    traffic.count_shared(3 * MIB)
    traffic.count_shared(MIB)
    assert [monitor.take({})["usage/shared_mib"] for _ in range(2)] == [4.0, 0.0]


def test_gpus_have_the_mean_utilisation_and_the_peak_memory_since_the_row_before() -> None:
    nvml = FakeNvml({"0": [(20, GIB), (60, 3 * GIB), (100, 2 * GIB)], "GPU-ab": [(0, 0), None]})
    sampler = GpuSampler(nvml, {0: "0", 1: "GPU-ab"}, period_s=3600.0)
    sampler.start()
    assert nvml.sampled.wait(10.0)
    sampler.close()  # the first sample is complete
    assert nvml.calls == ["init", "shutdown"]
    first = {"usage/gpu_0_busy": 0.2, "usage/gpu_0_memory_gib": 1.0}
    assert sampler.take() == first | {"usage/gpu_1_busy": 0.0, "usage/gpu_1_memory_gib": 0.0}
    sampler.sample()  # the second GPU fails, and is left out
    sampler.sample()
    assert sampler.take() == {"usage/gpu_0_busy": pytest.approx(0.6), "usage/gpu_0_memory_gib": 3.0}
    assert sampler.take() == {"usage/gpu_0_busy": 1.0, "usage/gpu_0_memory_gib": 2.0}  # the newest sample


def test_without_a_driver_nothing_is_sampled() -> None:
    nvml = FakeNvml()
    with UsageMonitor(gpus=GpuSampler(nvml, {0: "0"})) as monitor:
        assert not any(name.startswith("usage/gpu") for name in monitor.take({}))
        assert all(thread.name != "gpu-usage" for thread in threading.enumerate())
    assert nvml.calls == ["init"]


def test_a_run_without_gpus_has_no_thread() -> None:
    deployment = load_config(["env=toy"]).deployment
    assert sampler_of({}) is None
    if not any(place.devices for place in deployment.processes):
        assert used_gpus(deployment) == {}


def test_the_gpus_of_a_run_are_those_of_its_placement_on_the_first_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "read_machine", lambda: SimpleNamespace(gpus=("4", "GPU-ab")))
    places = [SimpleNamespace(node=0, devices=(1, 2)), SimpleNamespace(node=0, devices=(1,))]
    deployment: Any = SimpleNamespace(processes=(*places, SimpleNamespace(node=1, devices=(0,))))
    assert used_gpus(deployment) == {1: "GPU-ab", 2: "2"}


ROWS = [
    {"iteration": 0, "usage/cores_main": 9.0},
    {
        **{"iteration": 1, "usage/cores_main": 1.0, "usage/memory_main_gib": 0.5, "usage/cores_env": 2.0},
        **{"usage/idle_env": 0.25, "usage/sent_env_mib": 1.0, "usage/gpu_3_busy": 0.5, "usage/gpu_3_memory_gib": 8.0},
        **{"staleness/queue": 2.0},
    },
    {"iteration": 2, "usage/cores_main": 2.0, "usage/memory_main_gib": 1.5, "usage/idle_env": 0.75},
]


def test_a_row_is_shown_as_a_line() -> None:
    assert usage_text(ROWS[1]) == (
        "cores: main 1.0 env 2.0; memory in GiB: main 0.5; idle: env 25%; GPU 3: 50%, 8.0 GiB;"
        " shards waiting for training: 2"
    )
    assert usage_text({"iteration": 1, "usage/cores_main": None}) == ""


def test_a_run_is_shown_as_a_table_of_means_and_peaks() -> None:
    assert usage_table(ROWS) == [
        ("main", "1.50", "1.50 GiB", "–", "–", "–"),
        ("env", "2.00", "–", "50%", "1.00 MiB", "–"),
        ("GPU 3", "–", "8.00 GiB", "50%", "–", "–"),
        ("shards waiting for training: 2.0", "–", "–", "–", "–", "–"),
    ]
    assert usage_table([{"iteration": 1, "time/total_s": 1.0}]) == []


def test_the_panel_and_the_report_show_it(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Console("rich", 3, "run", RichConsole(file=stream, force_terminal=True, width=140)) as console:
        console.update(ROWS[2])
    assert "cores: main 2.0; memory in GiB: main 1.5; idle: env 75%" in stream.getvalue()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    page = report_page(tmp_path)
    assert "<h2>Usage</h2>" in page and "1.00 MiB" in page and "GPU 3" in page
