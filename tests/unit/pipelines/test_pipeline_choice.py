"""Which graph a configuration means, what the other settings ask of it, and how it is shown."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from expect import raises_code
from typer.testing import CliRunner, Result

from embodrl.cli.main import app
from embodrl.config.presets import presets
from embodrl.config.schema import Config
from embodrl.errors import ConfigError
from embodrl.pipelines.builtin import NODES
from embodrl.pipelines.graph import Graph, Pipeline
from embodrl.pipelines.load import load_config
from embodrl.pipelines.select import algorithm_name, build_graph, default_name
from embodrl.specs import PIPELINES
from embodrl.tools.listing.tables import pipelines
from embodrl.tools.pipeline_show.draw import to_mermaid, to_svg, to_text

TOY = ("env=toy", "model.warm_start=null")
PLAIN = ["rollout", "reward", "advantage", "train", "sync"]
OFFLINE = ("iql", "recap")
SAMPLED = ["rollout", "dynamic_sampling", *PLAIN[1:]]


@pytest.fixture(scope="module", autouse=True)
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A place where offline runs find data and labels."""
    directory = tmp_path_factory.mktemp("labelled")
    (directory / "meta").mkdir()
    (directory / "meta" / "advantages_recap.parquet").touch()
    DATA.append(str(directory))
    yield
    DATA.clear()


DATA: list[str] = []


def config_of(*overrides: str) -> Config:
    recorded = {f"algorithm={name}" for name in ("sac", *OFFLINE)} & {*overrides}
    offline = any(name in choice for choice in recorded for name in OFFLINE)
    data = (f"algorithm.off_policy.demos={DATA[0]}",) if offline else ()
    return load_config([*TOY, *(("model=mlp",) if recorded else ()), *data, *overrides]).config


def links(graph: Graph) -> dict[str, tuple[str, ...]]:
    return {node.name: node.deps for node in graph.nodes}


# -- which one --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "pipeline", "name"),
    [
        *(
            (name, "on_policy", name)
            for name in ("ppo", "grpo", "rloo", "reinforce_pp", "gspo", "cpgd", "dapo", "srpo")
        ),
        ("branch", "on_policy", "rloo"),
        ("sac", "off_policy", "sac"),
        *((name, "offline", name) for name in OFFLINE),
        ("dagger", "dagger", "dagger"),
        ("hg_dagger", "dagger", "dagger"),
    ],
)
def test_the_loss_chooses_the_pipeline_and_runs_are_named_after_the_algorithm(
    algorithm: str, pipeline: str, name: str
) -> None:
    implied = config_of(f"algorithm={algorithm}")
    assert implied.pipeline.name is None and default_name(implied) == pipeline
    assert algorithm_name(implied) == name
    chosen = config_of(f"algorithm={algorithm}", f"pipeline={pipeline}")
    assert chosen.algorithm == implied.algorithm and algorithm_name(chosen) == name
    assert build_graph(chosen) == build_graph(implied) and build_graph(chosen).name == pipeline


def test_every_pipeline_has_a_preset() -> None:
    assert presets("pipeline") == sorted(PIPELINES)


@pytest.mark.parametrize(
    ("overrides", "nodes"),
    [
        (("algorithm=ppo",), PLAIN),
        (("algorithm=grpo",), PLAIN),
        (("algorithm=gspo",), PLAIN),
        (("algorithm=cpgd",), PLAIN),
        (("algorithm=rloo",), PLAIN),
        (("algorithm=branch",), PLAIN),
        (("algorithm=srpo",), PLAIN),
        (("algorithm=dapo",), SAMPLED),
        (("algorithm=srpo", "algorithm.filter.enabled=true"), SAMPLED),
        (("algorithm=reinforce_pp",), [*PLAIN[:2], "reference", *PLAIN[2:]]),
        (("algorithm=dapo", "algorithm.kl.coef=0.1"), [*SAMPLED[:3], "reference", *SAMPLED[3:]]),
        (("algorithm=reinforce_pp", "algorithm.kl.coef=0"), PLAIN),
        ((), PLAIN),
    ],
)
def test_nodes_follow_from_the_settings(overrides: tuple[str, ...], nodes: list[str]) -> None:
    graph = build_graph(config_of(*overrides))
    assert [node.name for node in graph.nodes] == nodes
    batch = nodes[-4]  # the node before the advantages
    expected = {name: (before,) for before, name in itertools.pairwise(nodes)}
    assert links(graph) == {"rollout": (), **expected, "train": (batch, "advantage")}
    assert all(node.role == node.name and node.retries == 0 for node in graph.nodes)


def test_an_off_policy_loss_stores_before_it_trains() -> None:
    graph = build_graph(config_of("algorithm=sac"))
    nodes = ["rollout", "reward", "store", "train", "sync"]
    assert [(node.name, node.role) for node in graph.nodes] == [(name, name) for name in nodes]
    assert links(graph) == {"rollout": (), **{name: (before,) for before, name in itertools.pairwise(nodes)}}
    with raises_code("pipeline-role-needed", ConfigError, "store"):
        config_of("algorithm=sac", "pipeline.fn=embodrl.pipelines.builtin:on_policy")
    with raises_code("pipeline-role-unused", ConfigError, "store"):
        config_of("algorithm=ppo", "pipeline.fn=embodrl.pipelines.builtin:off_policy")


def test_an_offline_loss_needs_no_rollouts() -> None:
    graph = build_graph(config_of("algorithm=iql"))
    assert [(node.name, node.role) for node in graph.nodes] == [(name, name) for name in ("train", "sync")]
    with raises_code("pipeline-role-unused", ConfigError, "rollout"):
        config_of("algorithm=iql", "pipeline.fn=embodrl.pipelines.builtin:on_policy")
    with raises_code("pipeline-role-needed", ConfigError, "rollout"):
        config_of("algorithm=ppo", "pipeline.fn=embodrl.pipelines.builtin:offline")


def test_labels_are_stored_before_they_are_imitated() -> None:
    graph = build_graph(config_of("algorithm=dagger"))
    nodes = ["rollout", "store", "train", "sync"]
    assert [(node.name, node.role) for node in graph.nodes] == [(name, name) for name in nodes]


def with_values(rewards: Any, values: Any) -> None:
    """An estimator of the user's that asks for a critic."""


def without_values(rewards: Any) -> None:
    """An estimator of the user's that does not."""


@pytest.mark.parametrize(("estimator", "preset"), [("with_values", "ppo"), ("without_values", "grpo")])
def test_an_estimator_of_the_users_has_a_pipeline_too(estimator: str, preset: str) -> None:
    config = config_of(f"algorithm={preset}", f"algorithm.adv_type='{__name__}:{estimator}'")
    assert (default_name(config), algorithm_name(config)) == ("on_policy", preset)


def test_no_choice_is_a_choice() -> None:
    assert config_of("pipeline=null", "experiment=null") == config_of()


# -- a function of the user's -----------------------------------------------------------------------------------------


def build_plain(config: Config) -> Pipeline:
    """A pipeline of the user's without any of the optional nodes."""
    pipeline = Pipeline("mine").add_node("rollout", f"{NODES}:rollout", role="rollout")
    pipeline.add_node("advantage", f"{NODES}:advantage", ("rollout",), "advantage")
    pipeline.add_node("train", f"{NODES}:train", ("rollout", "advantage"), "train")
    return pipeline.add_node("sync", f"{NODES}:sync", ("train",), "sync")


def build_full(config: Config) -> Pipeline:
    """One with nodes that need their settings."""
    pipeline = Pipeline("mine").add_node("rollout", f"{NODES}:rollout", role="rollout")
    pipeline.add_node("again", f"{NODES}:dynamic_sampling", ("rollout",), "dynamic_sampling")
    pipeline.add_node("old", f"{NODES}:reference", ("again",), "reference")
    pipeline.add_node("advantage", f"{NODES}:advantage", ("old",), "advantage")
    pipeline.add_node("train", f"{NODES}:train", ("old", "advantage"), "train")
    return pipeline.add_node("sync", f"{NODES}:sync", ("train",), "sync")


def build_apart(advantage: str, train: str) -> Pipeline:
    """One whose nodes ``old`` and ``fresh`` add to the batch side by side, and others take it from where one says."""
    pipeline = Pipeline("mine").add_node("rollout", f"{NODES}:rollout", role="rollout")
    pipeline.add_node("old", f"{NODES}:reference", ("rollout",), "reference")
    pipeline.add_node("advantage", f"{NODES}:advantage", (advantage,), "advantage")
    pipeline.add_node("train", f"{NODES}:train", (train, "advantage"), "train")
    return pipeline.add_node("sync", f"{NODES}:sync", ("train",), "sync")


def build_late(config: Config) -> Pipeline:
    """One whose advantages are estimated before the values that they are relative to are put in."""
    return build_apart("old", "fresh").add_node("fresh", f"{NODES}:proximal", ("rollout",), "proximal")


def build_without_reference(config: Config) -> Pipeline:
    """One that trains on a batch without what the reference adds."""
    return build_apart("rollout", "rollout").add_node("log", f"{NODES}:advantage", ("old",), "sink")


def build_broken(config: Config) -> Pipeline:
    """One with several problems."""
    return build_plain(config).add_node("log", f"{NODES}:rewart", ("rolout",), "sink")


def build_twice(config: Config) -> Pipeline:
    """One that names a node twice."""
    return build_plain(config).add_node("train", f"{NODES}:train", ("rollout", "advantage"), "train")


FN = "pipeline.fn={}:{}"


def test_a_pipeline_of_the_users_is_taken() -> None:
    config = config_of(FN.format(__name__, "build_plain"))
    assert build_graph(config).name == "mine"
    found = {"rollout": (), "advantage": ("rollout",), "train": ("rollout", "advantage"), "sync": ("train",)}
    assert links(build_graph(config)) == found


SRPO = ("algorithm=srpo",)
FILTER = ("algorithm=dapo",)


@pytest.mark.parametrize(
    ("build", "overrides", "says"),
    [
        (
            "build_plain",
            ("algorithm.kl.coef=0.1",),
            ["algorithm.kl.coef above 0 needs a node with the role 'reference'"],
        ),
        ("build_plain", FILTER, ["algorithm.filter.enabled needs a node with the role 'dynamic_sampling'"]),
        ("build_plain", SRPO, ["algorithm.srpo.enabled needs a node with the role 'reward'"]),
        ("build_plain", ("reward.fn='math:fsum'",), ["reward.fn needs a node with the role 'reward'"]),
        (
            "build_full",
            (),
            [
                "a node has the role 'reference', which needs algorithm.kl.coef above 0",
                "a node has the role 'dynamic_sampling', which needs algorithm.filter.enabled",
            ],
        ),
        (
            "build_broken",
            (*FILTER, "algorithm.kl.coef=0.1"),
            [
                "node 'log': module 'embodrl.pipelines.nodes' has no attribute 'rewart'",
                "node 'log': depends on 'rolout', which does not exist",
                "algorithm.kl.coef above 0 needs a node with the role 'reference'",
                "algorithm.filter.enabled needs a node with the role 'dynamic_sampling'",
            ],
        ),
        (
            "build_late",
            ("algorithm.decoupled.enabled=true", "algorithm.kl.coef=0.1"),
            ["node 'advantage': needs what 'fresh' adds to the batch, but does not come after it"],
        ),
        (
            "build_without_reference",
            ("algorithm.kl.coef=0.1",),
            ["node 'train': needs what 'old' adds to the batch, but does not come after it"],
        ),
        (
            "build_without_reference",
            ("algorithm.kl={coef: 0.1,placement: reward}",),
            [
                "node 'advantage': needs what 'old' adds to the batch, but does not come after it",
                "node 'train': needs what 'old' adds to the batch, but does not come after it",
            ],
        ),
        ("build_twice", (), ["node 'train': pipeline 'mine' has a node 'train' already"]),
    ],
)
def test_a_pipeline_that_does_not_fit_is_refused_before_anything_starts(
    build: str, overrides: tuple[str, ...], says: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(*overrides, FN.format(__name__, build))
    found = caught.value.problems
    assert {problem.key for problem in found} == {"pipeline.fn"} and all(problem.hint for problem in found)
    assert [problem.message.partition(", but there is none")[0] for problem in found] == says


def test_the_runner_s_own_check_tells_the_same() -> None:
    config = config_of()
    wrong = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"fn": f"{__name__}:build_full"})})
    with raises_code("pipeline-role-unused") as caught:
        build_graph(wrong)
    assert len(caught.value.problems) == 2


def test_looking_at_a_pipeline_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "from embodrl.cli.main import main\n"
        "sys.argv = ['embodrl', 'pipeline', 'show', 'env=toy', 'model.warm_start=null', 'algorithm=dapo']\n"
        "try:\n    main()\nexcept SystemExit as leave:\n    code = leave.code\n"
        "print(code, sorted({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


# -- shown ------------------------------------------------------------------------------------------------------------


def fan() -> Graph:
    def node(context: Any, *outputs: Any) -> None:
        """Fit everywhere."""

    pipeline = Pipeline("a & b").add_node("rollout", node, role="rollout")
    pipeline.add_node("reward", node, ("rollout",), "reward", retries=2).add_node("end", node, ("reward",), "sink")
    pipeline.add_node("train", node, ("rollout", "reward"), "train")
    return pipeline.add_node("sync", node, ("train",), "sync").build()


def test_the_table_has_a_line_a_node() -> None:
    head, columns, *lines = to_text(fan()).splitlines()
    assert head == "pipeline a & b"
    assert re.split("  +", columns.strip()) == ["node", "role", "gets the outputs of", "function", "retries"]
    label = f"{__name__}:fan.<locals>.node"
    assert [re.split("  +", line) for line in lines] == [
        ["1", "rollout", "rollout", "-", label, "0"],
        ["2", "reward", "reward", "rollout", label, "2"],
        ["3", "end", "sink", "reward", label, "0"],
        ["4", "train", "train", "rollout, reward", label, "0"],
        ["5", "sync", "sync", "train", label, "0"],
    ]


def test_mermaid_has_every_node_and_every_edge() -> None:
    text = to_mermaid(fan())
    assert re.findall(r"^    n_(\w+) --> n_(\w+)$", text, re.MULTILINE) == [
        ("rollout", "reward"),
        ("reward", "end"),
        ("rollout", "train"),
        ("reward", "train"),
        ("train", "sync"),
    ]
    assert re.findall(r'^    n_(\w+)\["(.*?)<br/>', text, re.MULTILINE) == [
        ("rollout", "rollout"),
        ("reward", "reward (retries 2)"),
        ("end", "end"),
        ("train", "train"),
        ("sync", "sync"),
    ]
    assert "&lt;locals&gt;" in text and text.startswith("flowchart TD\n")


def test_the_picture_has_every_node_and_every_edge_and_no_boxes_overlap() -> None:
    root = ElementTree.fromstring(to_svg(fan()))
    tag = "{http://www.w3.org/2000/svg}"
    names = [text.text for text in root.iter(f"{tag}text") if text.get("font-weight")]
    assert sorted(names) == ["end", "reward (retries 2)", "rollout", "sync", "train"]  # pyright: ignore[reportArgumentType]
    assert len([path for path in root.iter(f"{tag}path") if path.get("fill") == "none"]) == 5
    boxes = [
        [float(rect.get(k, "0")) for k in ("x", "y", "width", "height")] for rect in root.findall(f"{tag}rect")[1:]
    ]
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for index, (x, y, w, h) in enumerate(boxes):
        assert min(x, y) >= 0 and x + w <= width and y + h <= height
        for left, top, wide, high in boxes[:index]:
            assert x + w <= left or left + wide <= x or y + h <= top or top + high <= y
    edges = [path.get("d", "") for path in root.iter(f"{tag}path") if path.get("fill") == "none"]
    assert all(path.startswith("M") and " C" in path for path in edges)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], prog_name="embodrl")


@pytest.mark.parametrize("ending", [".mmd", ".svg"])
def test_the_command_prints_and_draws(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / f"graph{ending}"
    path.parent.mkdir()
    done = run("pipeline", "show", *TOY, "algorithm=dapo", "--output", path)
    assert (done.exit_code, done.stderr) == (0, "")
    graph = build_graph(config_of("algorithm=dapo"))
    assert done.stdout == to_text(graph) + "\n"
    assert path.read_text() == {".mmd": to_mermaid, ".svg": to_svg}[ending](graph)
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_the_command_refuses_other_files_and_other_graphs(tmp_path: Path) -> None:
    done = run("pipeline", "show", *TOY, "-o", tmp_path / "graph.png")
    assert done.exit_code == 2 and ".mmd or .svg" in done.stderr and done.stdout == ""
    done = run("pipeline", "show", *TOY, "pipeline=off_policy", "-o", tmp_path / "graph.svg")
    assert done.exit_code == 2 and "pipeline-role-unused" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_list_names_every_pipeline() -> None:
    listed = {entry.name: entry.description for entry in pipelines()}
    assert listed == {name: PIPELINES.entry(name).description for name in PIPELINES}


def test_the_configuration_keeps_the_choice() -> None:
    loaded = load_config([*TOY, "pipeline=on_policy"])
    assert json.loads(loaded.config.model_dump_json())["pipeline"] == {"name": "on_policy", "fn": None, "placement": {}}
    assert loaded.choices["pipeline"] == "on_policy"
