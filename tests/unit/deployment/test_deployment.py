"""One deployment, solved in the driver: each process has its view from the start message, not from what it sees."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_server import NUM_CPUS, RAY_ENVIRONMENT, FakeLauncher
from sysfs_trees import build_server

from embodrl.config import LoadedConfig, load_config
from embodrl.deployment import Deployment, ProcessPlace, topology
from embodrl.errors import ConfigError
from embodrl.hybrid_engines.training import remote
from embodrl.scheduler.messages import CODEC
from embodrl.workers import acting_process, actor, parts, rollout_process
from embodrl.workers.env import gpu_variables
from embodrl.workers.remote_backend import launch_rollouts, rollout_channels

ROOT = Path(__file__).resolve().parents[3]
PLACES = "cluster.component_placement="
PROCESSES = ("actor.own_process=true", "rollout.own_process=true", "actor.micro_batch_size=10")
FSDP = (
    "actor=fsdp",
    "actor.micro_batch_size=10",
    "env.num_processes=16",
    "env.train.total_num_envs=64",
)
RAY_TWO = ("cluster=ray_local", "cluster.num_nodes=2", "cluster.ray_address=auto")
COMMANDS = {
    # presets, with processes of their own
    "local": ("cluster=local", *PROCESSES),
    "local fsdp": ("cluster=local", *FSDP),
    "1xh200": ("cluster=1xh200", *PROCESSES),
    "8xh100": ("cluster=8xh100", *PROCESSES),
    "8xh100 fsdp": ("cluster=8xh100", *FSDP),
    "2x8xh100": ("cluster=2x8xh100", "cluster.launcher=ray", *FSDP),
    "laptop": ("cluster=laptop", *PROCESSES),
    "ray_local": ("cluster=ray_local", "env.num_processes=8"),
    "ray_local fsdp": ("cluster=ray_local", *FSDP),
    # docs/rollout_processes.md
    "two rollouts": (PLACES + '{actor:0,rollout:"0:0-1",env:0}', "env.num_processes=8"),
    "training 0-3, rollouts 4-7": (
        "actor=fsdp",
        PLACES + "{actor:0-3,rollout:4-7,env:4-7}",
        "env.num_processes=8",
        "actor.micro_batch_size=40",
    ),
    "two machines": (*RAY_TWO, "cluster.device=cpu", PLACES + "{actor:0,rollout:0-1,env:0-1}"),
    # docs/backends.md, docs/megatron.md
    "fsdp, 2 processes": ("actor=fsdp", PLACES + "{actor:'0:0-1',rollout:0,env:0}", "cluster.device=cpu"),
    "fsdp, cut layers": (
        "actor=fsdp",
        "actor.tensor_parallel_size=2",
        PLACES + "{actor:'0:0-1',rollout:0,env:0}",
        "cluster.device=cpu",
    ),
    "megatron": ("actor=megatron", PLACES + "{actor:'0:0-1',rollout:0,env:0}", "cluster.device=cpu"),
    "hybrid": (*RAY_TWO, "env.pin_cpus=false", "cluster.num_threads=1", PLACES + "{actor:0,rollout:0-1,env:0-1}"),
    "disaggregated": (*RAY_TWO, "env.pin_cpus=false", PLACES + "{actor:0,rollout:1,env:1}"),
    "one process": ("actor.training_backend=native", PLACES + "{actor:0,rollout:0,env:0}", "cluster.device=cpu"),
    # docs/cluster.md
    "plan of two servers": (
        *("cluster=2x8xh100", "cluster.launcher=ray", "actor=fsdp", "actor.micro_batch_size=10"),
        *("env.num_processes=64", "env.train.total_num_envs=256"),
        PLACES + "{actor:0-7,rollout:8-15,env:8-15}",
    ),
    "two servers": (
        *RAY_TWO,
        *("actor=fsdp", "actor.micro_batch_size=20", "env.num_processes=8"),
        PLACES + "{actor:0-7,rollout:8-15,env:8-15}",
    ),
    # docs/placement.md
    "plan": (
        "cluster=8xh100",
        "env.num_processes=64",
        "env.train.total_num_envs=256",
        "actor=fsdp",
        "actor.micro_batch_size=8",
        PLACES + "{actor:0-3,rollout:4-7,env:0-7}",
    ),
    "node groups": (
        "cluster=2x8xh100",
        "cluster.launcher=ray",
        *FSDP,
        "cluster.node_groups=[{label: train, node_ranks: 0}, {label: play, node_ranks: 1}]",
        PLACES + "{actor:train/0-7,rollout:play/0-7,env:{node_group:play,placement:0-7}}",
    ),
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eight GPUs, two NUMA nodes of 32 cores with two threads each, seen by a driver without restrictions."""
    sysfs, proc = build_server(tmp_path)
    monkeypatch.setattr(topology, "SYSFS", sysfs)
    monkeypatch.setattr(topology, "PROC", proc)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(NUM_CPUS)))


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out of the workers' constructors all but what depends on where they run."""

    def pool(*_: object, places: tuple[ProcessPlace, ...]) -> SimpleNamespace:
        spec = SimpleNamespace(tasks=["task"], num_envs=1)
        calls = {"start_async": int, "wait_started": int, "call": lambda name, restart: [0]}
        return SimpleNamespace(**calls, spec=spec, places=places)

    def engine(config: object, policy: object, threads: int, part: object, memory: object) -> SimpleNamespace:
        return SimpleNamespace(threads=threads)

    def train_engine(*args: Any, **kwargs: object) -> SimpleNamespace:
        return SimpleNamespace(threads=args[2])  # of _native_engine

    monkeypatch.setattr(parts, "make_pool", pool)
    monkeypatch.setattr(parts, "make_rollout_engine", engine)
    monkeypatch.setattr(acting_process, "evaluator_class", lambda _: lambda *args, **kwargs: None)
    for name in ("make_sync_collector", "make_runners"):
        monkeypatch.setattr(rollout_process, name, lambda *args, **kwargs: [None])
    monkeypatch.setattr(remote.StateShapes, "of", lambda *args: None)
    monkeypatch.setattr(actor.torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(actor.dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(actor, "join_mesh", lambda *args, **kwargs: None)
    monkeypatch.setattr(actor, "_engine_of_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(actor, "_native_engine", train_engine)
    for module in (parts, actor):
        monkeypatch.setattr(module, "configure_torch", lambda config, threads: torch.device("cpu"))
        monkeypatch.setattr(module, "build_policy", lambda config: None)


POLICY: Any = SimpleNamespace(trainable_groups=dict, named_parameters=list)


def start(loaded: LoadedConfig, directory: Path) -> FakeLauncher:
    """Start the processes of a run, each with its start message and under its own environment alone."""
    config, deployment = loaded.config, loaded.deployment
    launcher = FakeLauncher(RAY_ENVIRONMENT if config.cluster.launcher == "ray" else {})
    if deployment.trains_in_processes:
        actor.make_train_engine(config, deployment, POLICY, directory, launcher)
    if deployment.rolls_out_in_processes:
        channels = rollout_channels(launcher, len(deployment.of("rollout")))
        launch_rollouts(config, deployment, launcher, channels, directory, ExitStack())
    assert bool(launcher.workers) == (deployment.trains_in_processes or deployment.rolls_out_in_processes)
    return launcher


@pytest.mark.parametrize("command", COMMANDS)
def test_every_rank_has_the_view_of_the_driver(command: str, server: None, workers: None, tmp_path: Path) -> None:
    loaded = load_config(list(COMMANDS[command]), verb="plan")
    deployment = loaded.deployment
    launcher = start(loaded, tmp_path)
    if deployment.rolls_out_in_processes:
        ranks = range(len(deployment.of("rollout")))
        pools = [launcher.workers["rollout", rank].pool for rank in ranks]
        assert [place for pool in pools for place in pool.places] == list(deployment.of("env"))
        threads = [launcher.workers["rollout", rank].engine.threads for rank in ranks]
        assert threads == [deployment.threads_of(place) for place in deployment.of("rollout")]
    for (group, rank), variables in launcher.variables.items():
        place = deployment.of(group)[rank]
        if place.devices:
            assert variables["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, place.devices))
        else:
            assert not variables.get("CUDA_VISIBLE_DEVICES")
    assert CODEC.copied(deployment) == deployment


def test_a_worker_counts_nothing(server: None, workers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_config(list(COMMANDS["training 0-3, rollouts 4-7"]))

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a worker reads the machine")

    for name in ("read_machine", "read_topology"):
        monkeypatch.setattr(topology, name, refuse)
    monkeypatch.setattr("embodrl.deployment.solver.read_machine", refuse)
    launcher = start(loaded, tmp_path)
    assert [launcher.variables["rollout", rank]["CUDA_VISIBLE_DEVICES"] for rank in range(4)] == ["4", "5", "6", "7"]
    # 8 simulators on GPUs 4-7, all of NUMA node 1, whose first cores are 32 to 39: two for each rollout process.
    cpus = [[place.cpus for place in launcher.workers["rollout", rank].pool.places] for rank in range(4)]
    assert cpus == [[(32 + 2 * rank,), (33 + 2 * rank,)] for rank in range(4)]
    # Each node has 32 cores of two threads, which the four processes on it share.
    assert [launcher.workers["rollout", rank].engine.threads for rank in range(4)] == [64 // 4] * 4


def test_gpus_keep_the_names_of_the_driver(
    server: None, workers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placements count what the driver sees: its GPUs 0 to 3 are 4 to 7 of the machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    loaded = load_config(["actor=fsdp", "actor.micro_batch_size=10", PLACES + "{actor:0-1,rollout:2-3,env:2-3}"])
    launcher = start(loaded, tmp_path)
    visible = {key: variables["CUDA_VISIBLE_DEVICES"] for key, variables in launcher.variables.items()}
    assert visible == {("actor", 0): "4", ("actor", 1): "5", ("rollout", 0): "6", ("rollout", 1): "7"}
    # All four are of NUMA node 1.
    assert {place.numa_node for place in loaded.deployment.processes} == {1}


def test_gpus_may_be_named_by_uuid(server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"GPU-{index}f2c9a40" for index in (3, 6)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    deployment = load_config(["actor=fsdp", "actor.micro_batch_size=10"]).deployment
    assert [place.visible for place in deployment.of("actor")] == names
    assert [place.numa_node for place in deployment.of("actor")] == [0, 1]


def test_a_process_on_the_processor_sees_no_gpu(server: None, workers: None, tmp_path: Path) -> None:
    loaded = load_config([PLACES + "{actor:0,rollout:node/0,env:node/0}", "rollout.own_process=true"])
    launcher = start(loaded, tmp_path)
    assert launcher.variables["rollout", 0]["CUDA_VISIBLE_DEVICES"] == ""


def test_simulators_on_machines_without_rollouts_have_hosts_there() -> None:
    placed = "{actor:0-7,rollout:0-7,env:8-15}"
    more = ("cluster=2x8xh100", "cluster.launcher=ray", "actor=fsdp", "env.num_processes=16", "env.video.enabled=false")
    sizes = ("env.train.total_num_envs=160", "actor.micro_batch_size=10")
    deployment = load_config([PLACES + placed, *more, *sizes], verb="plan").deployment
    hosts = deployment.simulator_hosts
    assert [(host.rank, host.node, host.devices, host.visible) for host in hosts] == [
        (rank, 1, (rank,), str(rank)) for rank in range(8)
    ]
    second = deployment.of("rollout")[1]
    assert [env.rank for env in deployment.simulators_of(second)] == [2, 3]
    beside = load_config([PLACES + "{actor:0-7,rollout:0-7,env:0-7}", *more, *sizes], verb="plan").deployment
    assert beside.simulator_hosts == ()


def test_simulators_render_on_the_gpus_that_they_are_placed_on(
    server: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    apart = "env.num_processes=4", "rollout.own_process=false"

    def variables(placement: str, *more: str) -> list[dict[str, str]]:
        deployment = load_config([PLACES + placement, *apart, *more], verb="plan").deployment
        return [gpu_variables(place) for place in deployment.of("env")]

    def device(name: str) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": name, "MUJOCO_EGL_DEVICE_ID": name}

    assert variables("{actor:0,rollout:0,env:6-7}") == [device(gpu) for gpu in "6677"]
    assert variables("{actor:0,rollout:0,env:node/0}") == [{"CUDA_VISIBLE_DEVICES": ""}] * 4
    assert variables("{actor:0,rollout:0,env:0}", "cluster.device=cpu") == [{}] * 4
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "1")  # the user's
    assert variables("{actor:0,rollout:0,env:5}") == [{"CUDA_VISIBLE_DEVICES": "5"}] * 4
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3f2c9a40,GPU-6f2c9a40")
    assert variables("{actor:0,rollout:0,env:1}") == [{"CUDA_VISIBLE_DEVICES": "GPU-6f2c9a40"}] * 4


def test_gpu_physics_has_a_process_on_each_gpu(server: None) -> None:
    physics = (
        "env=maniskill",
        "env.sim_backend=physx_cuda",
        "env.render_backend=gpu",
        PLACES + "{actor:0,rollout:0,env:4-7}",
    )
    load_config([*physics, "env.num_processes=4"], verb="plan")
    with pytest.raises(ConfigError) as caught:
        load_config([*physics, "env.num_processes=8"], verb="plan")
    assert [(found.key, found.code) for found in caught.value.problems] == [("env.num_processes", "gpu-physics-fits")]


def test_threads_are_shared_by_the_neighbours_on_a_machine(server: None) -> None:
    def threads(*arguments: str) -> list[int]:
        deployment = load_config(list(arguments), verb="plan").deployment
        return [deployment.threads_of(place) for place in deployment.of("actor")]

    two = PLACES + "{actor:'0:0-1',rollout:0,env:0}"
    assert threads("actor=fsdp", "cluster.device=cpu", two) == [64, 64]
    assert threads("actor=fsdp", "cluster.device=cpu", two, "cluster.num_threads=6") == [3, 3]
    # Three on NUMA node 0, one on node 1; 64 threads each.
    places = PLACES + "{actor:2-5,rollout:0,env:0}"
    assert threads("actor=fsdp", "actor.micro_batch_size=10", places) == [32, 32, 32, 32]
    places = PLACES + "{actor:1-4,rollout:0,env:0}"
    assert threads("actor=fsdp", "actor.micro_batch_size=10", places) == [21, 21, 21, 64]


def test_a_deployment_survives_a_start_message(server: None) -> None:
    deployment = load_config(list(COMMANDS["2x8xh100"]), verb="plan").deployment
    arrived = CODEC.copied({"deployment": deployment})["deployment"]
    assert isinstance(arrived, Deployment) and arrived == deployment
    assert [place.node for place in arrived.of("rollout")] == [0] * 8 + [1] * 8
    assert arrived.machines[1].nodes == deployment.machines[1].nodes


def test_every_documented_placement_is_started_here() -> None:
    def plain(text: str) -> str:
        return re.sub(r"[\s'\"]", "", text)

    tested = {plain(part.removeprefix(PLACES)) for parts in COMMANDS.values() for part in parts if PLACES in part}
    pages = [path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]]
    written = {plain(found) for page in pages for found in re.findall(r"component_placement=({[^}]*})", page)}
    assert written and written <= tested


def test_evaluation_beside_training_has_a_place_of_its_own() -> None:
    """The first GPU that neither trains nor acts, and cores that no simulator of the rollouts has."""
    placed = (*FSDP, "env.num_processes=48", "env.train.total_num_envs=96")
    loaded = load_config(
        ["cluster=8xh100", *placed, PLACES + "{actor:0-3,rollout:4-6,env:4-6}", "runner.eval_async=true"], None, "plan"
    )
    deployment = loaded.deployment
    (place,) = deployment.of("eval")
    assert (place.node, place.devices, place.visible) == (0, (7,), "7")
    simulators = deployment.of("eval_env")
    assert len(simulators) == 16  # as one of three rollout processes
    assert {each.devices for each in simulators} == {(7,)}
    core_of = deployment.machines[0].core_of
    cores = [core_of[each.cpus[0]] for each in (*deployment.of("env"), *simulators)]
    assert len(set(cores)) == 64
    without = load_config(["cluster=8xh100", *placed, PLACES + "{actor:0-3,rollout:4-6,env:4-6}"], None, "plan")
    assert without.deployment.processes == deployment.processes[: len(without.deployment.processes)]


def test_evaluation_beside_training_shares_the_gpu_of_the_rollouts_where_none_is_left() -> None:
    deployment = load_config(["cluster=1xh200", "runner.eval_async=true"], None, "plan").deployment
    assert deployment.of("eval")[0].devices == deployment.of("rollout")[0].devices == (0,)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["rollout=vllm", "model=openvla"], "evaluations-beside-can-run"),
        (["env.sim_backend=physx_cuda", "env.num_processes=2", "cluster=8xh100"], "evaluations-beside-can-run"),
    ],
)
def test_an_evaluation_beside_training_that_could_not_run_is_refused(settings: list[str], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["env=maniskill", "runner.eval_async=true", *settings], None, "plan")
    assert code in {problem.code for problem in caught.value.problems}
