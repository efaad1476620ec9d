import pytest
from expect import raises_code
from sysfs_trees import build_laptop, build_server

from embodrl.config import LoadedConfig, load_config
from embodrl.config.schema.cluster import HardwareConfig
from embodrl.deployment.grammar import MACHINES, PlacementError, assign, make_pool, parse_ranks, split_group
from embodrl.deployment.solver import describe_machine, solve
from embodrl.deployment.topology import Machine, assign_cpus, read_topology
from embodrl.errors import ConfigError

EIGHT = make_pool((8,))


def devices(processes):
    return [process.devices for process in processes]


def test_processes_of_each_piece():
    place = parse_ranks("0-1:0-3,3-5,7-10:7-8")
    assert place is not None
    assert place.devices_of == ((0,), (0,), (1,), (1,), (3,), (4,), (5,), (7, 8), (9, 10))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0-1:0-2", "3 processes and 2 devices do not divide evenly: 3 / 2 leaves 1"),
        ("0-1:0-3,2-3:2-5", "the processes start with 2, but 4 come first"),
        ("0-1,1-2", "named twice"),
    ],
)
def test_uneven_and_overlapping_pieces(text, says):
    with pytest.raises(PlacementError, match=says):
        parse_ranks(text)


def test_placements_on_devices():
    assert devices(assign("actor", "all", EIGHT)) == [(gpu,) for gpu in range(8)]
    assert devices(assign("actor", "all", EIGHT, single=True)) == [(0,)]
    assert devices(assign("actor", "4-7:0-1", EIGHT)) == [(4, 5), (6, 7)]
    assert devices(assign("env", "0-1", EIGHT, num_processes=4)) == [(0,), (0,), (1,), (1,)]
    assert devices(assign("env", "0-3", EIGHT, num_processes=2)) == [(0, 1), (2, 3)]
    assert devices(assign("env", "all", EIGHT, num_processes=3)) == [(0, 1), (2, 3, 4), (5, 6, 7)]


def test_placements_that_can_not_be_had():
    with pytest.raises(PlacementError, match="needs 9 devices, and the cluster offers 8"):
        assign("actor", "4-8", EIGHT)
    with pytest.raises(PlacementError, match="6 / 4 leaves 2") as uneven:
        assign("env", "0-3", EIGHT, num_processes=6)
    assert uneven.value.hint == "set env.num_processes to 4 or 8, or write all"
    with pytest.raises(PlacementError, match="several machines"):
        assign("actor", "7-8:0", make_pool((8, 8)))


def test_several_machines_and_groups():
    two = make_pool((4, 4))
    assert [(p.node, p.devices) for p in assign("actor", "3-4", two)] == [(0, (3,)), (1, (0,))]
    group = make_pool((4, 4, 4), nodes=(2,), label="fast")
    assert [(p.node, p.devices) for p in assign("actor", "0-1", group)] == [(2, (0,)), (2, (1,))]
    with pytest.raises(PlacementError, match="node group 'fast' offers 4"):
        assign("actor", "4", group)
    whole = make_pool((4, 4), label=MACHINES)
    assert [(p.node, p.devices) for p in assign("env", "0-1:0-3", whole, 4)] == [(0, ()), (0, ()), (1, ()), (1, ())]
    assert split_group("fast/0-1:0-3") == ("fast", "0-1:0-3") and split_group("0-3") == ("", "0-3")


def plan(placement, *more):
    settings = ["actor.micro_batch_size=20", "env.num_processes=8", f"cluster.component_placement={placement}"]
    return load_config(["cluster=8xh100", *settings, *more], verb="plan")


@pytest.mark.parametrize(
    ("placement", "mode"),
    [
        ("{actor:0-3,rollout:4-7,env:4-7}", "hybrid"),
        ("{actor:0-1,rollout:2-3,env:4-7}", "disaggregated"),
        ("{actor:0-7,rollout:0-7,env:0-7}", "co-located"),
        ("{actor:0-1,rollout:2-3,env:{node_group:node,placement:all}}", "disaggregated"),
    ],
)
def test_modes(placement, mode):
    assert plan(placement).deployment.mode == mode


def test_processes_are_pinned_near_their_gpu(tmp_path):
    sysfs, proc = build_server(tmp_path)
    config = plan("{actor:0-3,rollout:4-7,env:0-7}").config
    machine = Machine(tuple("01234567"), 128, 0, read_topology(sysfs, range(128), proc))
    placement = solve(config, machine).deployment
    simulators = placement.of("env")
    assert [place.devices for place in simulators] == [(gpu,) for gpu in range(8)]
    assert [place.numa_node for place in simulators] == [0] * 4 + [1] * 4
    assert [place.cpus for place in simulators] == [(0,), (1,), (2,), (3,), (32,), (33,), (34,), (35,)]
    assert placement.of("actor")[2].cpus == (*range(32), *range(64, 96))
    assert placement.of("rollout")[0].numa_node == 1


def test_described_hardware_is_laid_out_like_the_recorded_server(tmp_path):
    sysfs, _ = build_server(tmp_path)
    hardware = load_config(["cluster=8xh100", "cluster.hardware.num_cores=64"], verb="plan").config.cluster.hardware
    described, recorded = describe_machine(hardware), read_topology(sysfs, range(128))
    assert (described.nodes, described.num_cores) == (recorded.nodes, recorded.num_cores)
    assert [gpu.numa_node for gpu in described.gpus] == [gpu.numa_node for gpu in recorded.gpus]
    assert described.core_of == recorded.core_of


def test_a_machine_without_gpus_is_pinned_as_before(tmp_path):
    machine = read_topology(build_laptop(tmp_path), {0, 1})
    config = load_config(["cluster.device=cpu"]).config
    placement = solve(config, Machine((), 2, 0, machine)).deployment
    assert placement.mode == "co-located"
    found = [(place.cpus, place.numa_node) for place in placement.of("env")]
    assert found == [((slot.cpu,), slot.numa_node) for slot in assign_cpus(2, machine)]
    assert placement.of("actor")[0].cpus == ()


def test_node_groups_of_a_configuration():
    placement = plan(
        "{actor:{node_group:train,placement:0-7},rollout:play/0-7,env:play/0-7}",
        "cluster=2x8xh100",
        "cluster.node_groups=[{label: train, node_ranks: 1}, {label: play, node_ranks: 0}]",
    ).deployment
    assert {place.node for place in placement.of("actor")} == {1}
    assert {place.node for part in ("rollout", "env") for place in placement.of(part)} == {0}


def test_all_problems_come_at_once():
    with pytest.raises(ConfigError) as caught:
        plan("{actor:0-2,rollout:0-2,env:8}", "env.num_processes=4", "actor.micro_batch_size=80")
    report = str(caught.value)
    assert "160 / 3 leaves 1" in report
    assert "3 rollout processes x 1 pipeline stage(s) = 3 groups of simulators: 4 / 3 leaves 1" in report
    assert "needs 9 devices, and the cluster offers 8" in report


def test_training_refuses_what_planning_allows():
    with raises_code("native-is-one-process", ConfigError) as caught:
        load_config(["cluster=8xh100", "cluster.component_placement={actor:0-3,rollout:0,env:all}"])
    assert "'8xh100' is described, but this machine has" in str(caught.value)


AUTO = ("env=maniskill", "model=openvla", "cluster.placement=auto")
MANY = (
    *("actor=fsdp", "actor.micro_batch_size=10", "env.num_processes=32"),
    "env.train.total_num_envs=64",
)
THIRTY = ("env.num_processes=30", "env.train.total_num_envs=120")
AHEAD = "runner.max_staleness=1"


@pytest.mark.parametrize(
    ("settings", "actors", "rollouts"),
    [
        # Turns: both on all devices; 160 chunks in micro-batches of 10 are shared by 8 and by 16.
        (("cluster=8xh100", *MANY), range(8), range(8)),
        (("cluster=2x8xh100", "cluster.launcher=ray", *MANY), range(16), range(16)),
        # One process trains; rollouts are limited by the simulators, and lie spread.
        (("cluster=8xh100", "env.num_processes=4"), [0], [0, 2, 4, 6]),
        # At the same time: 8 is divided as the work is.
        (("cluster=8xh100", *MANY, AHEAD), range(4), range(4, 8)),
        (("cluster=8xh100", *MANY, AHEAD, "cluster.training_share=0.2", *THIRTY), range(2), range(2, 8)),
        (("cluster=8xh100", *MANY, AHEAD, "cluster.training_share=0.8"), range(4), range(4, 8)),
        (("cluster=8xh100", "env.num_processes=4", AHEAD), [0], range(1, 5)),
        # By name: turns although rollouts could run ahead, and the reverse.
        (("cluster=8xh100", *MANY, AHEAD, "cluster.placement=colocated"), range(8), range(8)),
        (("cluster=8xh100", *MANY, "cluster.placement=disaggregated"), range(4), range(4, 8)),
        (("cluster=8xh100", "cluster.placement=disaggregated", "cluster.training_share=0.2"), [0], [1, 2]),
        # Nothing to divide.
        (("cluster=1xh200", *MANY), [0], [0]),
        (("cluster=1xh200", AHEAD), [0], [0]),
        (("cluster=laptop",), [-1], [-1]),
        # One process gathers and trains; its simulators may render on every GPU.
        (("cluster=8xh100", "algorithm=sac", "model=mlp", "env.num_processes=8"), [0], [0]),
    ],
)
def test_an_automatic_placement_fills_the_cluster(
    settings: tuple[str, ...], actors: list[int], rollouts: list[int]
) -> None:
    loaded = load_config([*AUTO, *settings], None, "plan")
    deployment = loaded.deployment
    gpus = max(1, deployment.gpus_per_node)

    def devices(component: str) -> list[int]:
        return [gpus * place.node + next(iter(place.devices), -1) for place in deployment.of(component)]

    assert devices("actor") == list(actors) and devices("rollout") == list(rollouts)
    share = len(deployment.of("env")) // len(rollouts)
    for rollout in deployment.of("rollout"):
        mine = deployment.of("env")[rollout.rank * share : (rollout.rank + 1) * share]
        assert {place.node for place in mine} == {rollout.node}
        assert len(rollouts) == 1 or {place.devices for place in mine} == {rollout.devices}
    assert deployment.reasons
    # The plan's last line is the same placement, given by hand.
    by_hand = deployment.reasons[-1].partition("'")[2].removesuffix("'")
    others = [setting for setting in settings if not setting.startswith("cluster.placement=")]
    given = load_config([*AUTO[:2], *others, by_hand], None, "plan").deployment
    assert given.processes == deployment.processes and given.reasons == ()


@pytest.mark.parametrize(
    ("settings", "rollouts", "envs"),
    [
        (("cluster=8xh100", *MANY), [0, 1, 2, 3], [4, 5, 6, 7]),
        (("cluster=8xh100", "env.num_processes=2"), [0, 1], [2, 3]),
        (("cluster=8xh100", "algorithm=sac", "model=mlp", "env.num_processes=4"), [0], [1, 2, 3, 4]),
        (
            ("cluster=2x8xh100", "cluster.launcher=ray", *MANY),
            [0, 1, 2, 3, 8, 9, 10, 11],
            [4, 5, 6, 7, 12, 13, 14, 15],
        ),
    ],
)
def test_a_hybrid_placement_gives_simulators_and_the_acting_policy_their_own_gpus(
    settings: tuple[str, ...], rollouts: list[int], envs: list[int]
) -> None:
    loaded = load_config([*AUTO[:2], *settings, "cluster.placement=hybrid"], None, "plan")
    deployment = loaded.deployment

    def devices(component: str) -> list[int]:
        return [8 * place.node + place.devices[0] for place in deployment.of(component)]

    assert devices("rollout") == rollouts and sorted(set(devices("env"))) == envs
    assert deployment.mode == "hybrid"
    assert len(deployment.of("actor")) == (
        1 if "actor=fsdp" not in settings else deployment.gpus_per_node * (1 + max(rollouts) // 8)
    )


@pytest.mark.parametrize("name", ["disaggregated", "hybrid"])
@pytest.mark.parametrize("cluster", ["laptop", "1xh200"])
def test_one_device_is_not_divided(name: str, cluster: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*AUTO[:2], f"cluster={cluster}", f"cluster.placement={name}"], None, "plan")
    assert [(problem.key, problem.code) for problem in caught.value.problems] == [("cluster.placement", "places-exist")]


def test_a_placement_by_name_is_a_preset_of_the_cluster() -> None:
    assert load_config(["env=toy", "model=mlp", "cluster=colocated"]).deployment.reasons
    for name in ("disaggregated", "hybrid"):
        with pytest.raises(ConfigError) as caught:
            load_config(["env=toy", "model=mlp", f"cluster={name}", "cluster.device=cpu"])
        assert [problem.code for problem in caught.value.problems] == ["places-exist"]


@pytest.mark.parametrize(
    ("arguments", "placement"),
    [
        (["actor=0"], {"rollout,env": "all", "actor": "0"}),
        (["env=0-3"], {"actor,rollout": "all", "env": "0-3"}),
        (["rollout=1", "actor=0"], {"env": "all", "rollout": "1", "actor": "0"}),
        (["rollout=1", "actor=0", "env=1", "actor=2"], {"rollout": "1", "actor": "2", "env": "1"}),
    ],
)
def test_one_component_is_placed_on_the_command_line(arguments: list[str], placement: dict[str, str]) -> None:
    given = [f"cluster.component_placement.{argument}" for argument in arguments]
    config = load_config(
        ["env=maniskill", "model=openvla", "cluster=8xh100", "env.num_processes=4", *given], None, "plan"
    ).config
    assert {name: str(place) for name, place in config.cluster.component_placement.items()} == placement


def test_a_placement_is_given_or_chosen() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*AUTO, "cluster=8xh100", "cluster.component_placement={actor:0,rollout:0,env:0}"], None, "plan")
    assert [problem.code for problem in caught.value.problems] == ["there-is-one-placement"]
    notes = load_config([*AUTO, "cluster=8xh100", "cluster.training_share=0.3"], None, "plan").notes
    assert "setting-applies" in {note.code for note in notes}


CARDS = "{label: cards, node_ranks: 1, hardware: {name: 4xl40, num_gpus: 4, gpu_memory_gib: 48, num_cores: 32}}"
CORES = "{label: cores, node_ranks: 2-3, hardware: {name: cpu16, num_cores: 16, memory_gib: 64}}"
UNLIKE = (
    *("env=toy", "model=openvla", "cluster=8xh100", "cluster.num_nodes=4", "cluster.launcher=ray"),
    *(f"cluster.node_groups=[{CARDS},{CORES}]", "actor=fsdp", "actor.micro_batch_size=5", "env.num_processes=4"),
)


def unlike(placement: str) -> LoadedConfig:
    """Return the plan for a machine with 8 GPUs, one with 4, and two without."""
    return load_config([*UNLIKE, f"cluster.component_placement={placement}"], verb="plan")


def located(loaded: LoadedConfig, component: str) -> list[tuple[int, tuple[int, ...]]]:
    return [(place.node, place.devices) for place in loaded.deployment.of(component)]


def test_devices_of_machines_that_are_not_alike() -> None:
    # Over the cluster, machine 0 has the ranks 0 to 7, machine 1 has 8 to 11, and the others have none.
    loaded = unlike("{actor:0-7,rollout:8-11,env:8-11}")
    assert located(loaded, "actor") == [(0, (gpu,)) for gpu in range(8)]
    assert located(loaded, "rollout") == located(loaded, "env") == [(1, (gpu,)) for gpu in range(4)]
    assert located(unlike("{actor:0-7,rollout:cards/0-3,env:cards/0-3}"), "rollout") == located(loaded, "rollout")
    # A group without GPUs counts its machines; simulators are bound to the 16 cores there.
    loaded = unlike("{actor:0-7,rollout:cores/0-1,env:cores/0-1}")
    assert located(loaded, "rollout") == [(2, ()), (3, ())]
    assert [(place.node, place.cpus) for place in loaded.deployment.of("env")] == [
        *((2, (0,)), (2, (1,))),
        *((3, (0,)), (3, (1,))),
    ]
    assert [len(machine.gpus) for machine in loaded.deployment.machines] == [8, 4, 0, 0]
    assert [sum(machine.num_cores.values()) for machine in loaded.deployment.machines] == [112, 32, 16, 16]
    assert loaded.deployment.machines[1].gpus[0].memory_bytes == 48 * 2**30
    # Without GPUs there is none to hide.
    assert [place.visible for place in loaded.deployment.of("rollout")] == [None, None]


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ("{actor:0-7,rollout:cards/0-4,env:cards/0-4}", "needs 5 devices, and node group 'cards' offers 4"),
        ("{actor:0-7,rollout:8-12,env:8-12}", "needs 13 devices, and the cluster offers 12"),
        ("{actor:0-7,rollout:cores/2,env:cores/2}", "needs 3 devices, and node group 'cores' offers 2"),
    ],
)
def test_a_device_that_a_machine_lacks_is_refused(placement: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        unlike(placement)


def test_a_run_takes_the_described_hardware_of_other_machines_and_reads_its_own() -> None:
    cluster = load_config(
        [*UNLIKE, "cluster.component_placement={actor:0-7,rollout:cards/0-3,env:cards/0-3}"], verb="plan"
    ).config.cluster
    here = Machine(tuple("01234567"), 4, 0, read_topology(allowed={0, 1}))
    alike = cluster.model_copy(update={"hardware": HardwareConfig()})
    config = load_config(["env=toy"]).config.model_copy(update={"cluster": alike})
    config = config.model_copy(update={"env": config.env.model_copy(update={"num_processes": 4})})
    machines = solve(config, here).deployment.machines
    assert machines[0] is here.topology and len(machines[1].gpus) == 4 and not machines[2].gpus
