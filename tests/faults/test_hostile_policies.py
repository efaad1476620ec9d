"""Policy directories that are damaged or made to harm: refused by code, file and key, in bounded memory and time."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file, save_file
from tiny_families import build, tiny_config

from embodrl.config import load_config
from embodrl.errors import CheckpointError, OutputError
from embodrl.models.common.checkpoint import check_links
from embodrl.models.registry import build_policy
from embodrl.storage.integrity import CHECKSUMS, check_checksums
from embodrl.trainer.files import export_policy

SPARE_MEMORY = 2 * 2**30
"""Address space that a load may take; what a hostile file asks for is more."""
NAN, INF = float("nan"), float("inf")
WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
STATS = {
    "openvla": "dataset_statistics.json",
    "pi0": "assets/maniskill/norm_stats.json",
    "gr00t": "experiment_cfg/metadata.json",
    "gr00t_n1_7": "statistics.json",
}
Edit = Callable[[Path], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("saved")
    for family in STATS:
        build(family).save_pretrained(root / family)
    return {family: root / family for family in STATS}


@pytest.fixture
def bounded() -> Iterator[None]:
    """Limit the memory, so that a load that asks for terabytes fails instead of taking the machine's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + SPARE_MEMORY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def value(file: str, *keys: str | int, to: object) -> Edit:
    """Set one value in a JSON file."""

    def edit(directory: Path) -> None:
        content = json.loads((directory / file).read_text())
        holder = content
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = to
        (directory / file).write_text(json.dumps(content))

    return edit


def text(file: str, content: str | bytes) -> Edit:
    """Replace a file's content."""

    def edit(directory: Path) -> None:
        (directory / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    return edit


def tensor(change: Callable[[torch.Tensor], torch.Tensor], file: str = WEIGHTS) -> Edit:
    """Change the last tensor of a file."""

    def edit(directory: Path) -> None:
        tensors = load_file(directory / file)
        name = max(tensors)
        tensors[name] = change(tensors[name].clone())
        save_file(tensors, directory / file)

    return edit


def poisoned(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(weight: torch.Tensor) -> torch.Tensor:
        weight.view(-1)[-1] = number
        return weight

    return change


def index(weight_map: object) -> Edit:
    """Put an index of shards in the place of the single file."""

    def edit(directory: Path) -> None:
        (directory / WEIGHTS).rename(directory.parent / "outside.safetensors")
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return edit


def link(file: str) -> Edit:
    def edit(directory: Path) -> None:
        (directory / file).rename(directory.parent / "outside")
        (directory / file).symlink_to("../outside")

    return edit


def pipe(directory: Path) -> None:
    (directory / CONFIG).unlink()
    os.mkfifo(directory / CONFIG)


def truncated(directory: Path) -> None:
    os.truncate(directory / WEIGHTS, (directory / WEIGHTS).stat().st_size // 2)


NESTED = '{"text_config": ' + "[" * 200_000 + "]" * 200_000 + "}"
OWN = ("embodrl",)
TEXT = ("text_config",)
LAYERS = "num_hidden_layers"
ACTION = ("maniskill", "action")
PI_STATS = (STATS["pi0"], "norm_stats", "actions")
ROBOT = (STATS["gr00t"], "new_embodiment", "statistics", "action", "action")
HEAD = (CONFIG, "action_head_cfg")
KWARGS = ("processor_config.json", "processor_kwargs")
LATER = (*KWARGS, "modality_configs", "new_embodiment")
FILE = "policy-file"

CASES: list[tuple[str, str, Edit, str, tuple[str, ...]]] = [
    # config.json
    (
        "ten million layers",
        "openvla",
        value(CONFIG, *TEXT, "num_hidden_layers", to=10**7),
        FILE,
        ("num_hidden_layers",),
    ),
    ("more layers than stored", "openvla", value(CONFIG, *TEXT, LAYERS, to=400), FILE, ("400 layers",)),
    ("negative width", "openvla", value(CONFIG, *TEXT, "hidden_size", to=-128), FILE, ("hidden_size", "-128")),
    ("width as text", "openvla", value(CONFIG, *TEXT, "hidden_size", to="128"), FILE, ("hidden_size", "128")),
    ("width as fraction", "openvla", value(CONFIG, *TEXT, "hidden_size", to=32.5), FILE, ("hidden_size",)),
    ("infinite constant", "openvla", value(CONFIG, *TEXT, "rms_norm_eps", to=INF), FILE, ("rms_norm_eps",)),
    ("text_config as list", "openvla", value(CONFIG, "text_config", to=[1]), FILE, ("text_config",)),
    ("deep nesting", "openvla", text(CONFIG, NESTED), FILE, (CONFIG, "nested")),
    ("a list", "openvla", text(CONFIG, "[1, 2]"), FILE, (CONFIG, "object")),
    ("cut short", "openvla", text(CONFIG, '{"model_type": "openv'), FILE, (CONFIG, "JSON")),
    ("not text", "openvla", text(CONFIG, b"\xff\xfe\x00\x01"), FILE, (CONFIG, "JSON")),
    ("too large", "openvla", text(CONFIG, '{"a": "' + "x" * 2**24 + '"}'), FILE, (CONFIG, "larger")),
    ("endless digits", "openvla", text(CONFIG, '{"a": ' + "9" * 10**6 + "}"), FILE, (CONFIG,)),
    ("a pipe", "openvla", pipe, FILE, (CONFIG,)),
    ("heads that do not divide", "openvla", value(CONFIG, *OWN, "dino", "num_heads", to=3), FILE, ("num_heads",)),
    ("no patch size", "openvla", value(CONFIG, *OWN, "siglip", "patch_size", to=0), FILE, ("patch_size",)),
    ("action ids beyond", "openvla", value(CONFIG, "n_action_bins", to=10**9), FILE, ("n_action_bins",)),
    ("padding id beyond", "openvla", value(CONFIG, "pad_token_id", to=10**9), FILE, ("pad_token_id",)),
    ("endless prompts", "pi0", value(CONFIG, *OWN, "max_prompt_tokens", to=10**9), FILE, ("max_prompt_tokens",)),
    ("deep Gemma", "pi0", value(CONFIG, *OWN, "vlm", "depth", to=10**7), FILE, ("vlm", "depth")),
    ("two Gemmas", "pi0", value(CONFIG, *OWN, "vlm", "num_heads", to=4), FILE, ("vlm", "expert")),
    ("unknown method", "pi0", value(CONFIG, *OWN, "normalization", "state", to="x"), FILE, ("state", "mean_std")),
    ("a number as section", "pi0", value(CONFIG, "embodrl", to=7), FILE, ("embodrl",)),
    ("endless horizon", "gr00t", value(*HEAD, "action_horizon", to=10**9), FILE, ("action_horizon",)),
    ("deep Qwen", "gr00t", value(CONFIG, "backbone_cfg", "select_layer", to=10**7), FILE, ("select_layer",)),
    (
        "robot number as text",
        "gr00t",
        value(CONFIG, *OWN, "embodiment_ids", to={"a": "1"}),
        FILE,
        ("ids",),
    ),
    # statistics
    ("NaN", "openvla", value(STATS["openvla"], *ACTION, "q01", 2, to=NAN), FILE, (STATS["openvla"], "q01[2]")),
    ("huge", "openvla", value(STATS["openvla"], *ACTION, "q99", 0, to=1e30), FILE, (STATS["openvla"], "q99[0]")),
    ("text", "openvla", value(STATS["openvla"], *ACTION, "q01", 0, to="low"), FILE, (STATS["openvla"], "q01[0]")),
    ("lengths", "openvla", value(STATS["openvla"], *ACTION, "q01", to=[-1.0]), FILE, (STATS["openvla"], "q01")),
    ("mask", "openvla", value(STATS["openvla"], *ACTION, "mask", to=[True]), FILE, (STATS["openvla"], "mask")),
    ("reversed", "openvla", value(STATS["openvla"], *ACTION, "q01", 3, to=5.0), FILE, ("q01[3]", "q99[3]")),
    ("no list", "openvla", value(STATS["openvla"], *ACTION, "q01", to={}), FILE, (STATS["openvla"], "q01")),
    ("no action", "openvla", value(STATS["openvla"], "maniskill", to=[]), FILE, (STATS["openvla"], "maniskill")),
    ("infinite mean", "pi0", value(*PI_STATS, "mean", 1, to=INF), FILE, (STATS["pi0"], "mean[1]")),
    ("negative deviation", "pi0", value(*PI_STATS, "std", 0, to=-1.0), FILE, (STATS["pi0"], "std[0]")),
    ("one deviation", "pi0", value(*PI_STATS, "std", to=[1.0]), FILE, (STATS["pi0"], "std")),
    ("NaN of a robot", "gr00t", value(*ROBOT, "min", 0, to=NAN), FILE, (STATS["gr00t"], "min[0]")),
    ("reversed robot", "gr00t", value(*ROBOT, "max", 0, to=-9.0), FILE, (STATS["gr00t"], "max[0]")),
    (
        "NaN of N1.7",
        "gr00t_n1_7",
        value("statistics.json", *LATER[3:], "action", "action", "q01", 0, to=NAN),
        FILE,
        ("q01[0]",),
    ),
    ("too few positions", "gr00t_n1_7", value(CONFIG, "max_seq_len", to=1), FILE, ("max_seq_len",)),
    ("no kwargs", "gr00t_n1_7", value(*KWARGS, to=[]), FILE, ("processor_kwargs",)),
    ("history as number", "gr00t_n1_7", value(*LATER, "state", "delta_indices", to=7), FILE, ("delta_indices",)),
    ("endless picture", "gr00t_n1_7", value(*KWARGS, "shortest_image_edge", to=10**6), FILE, ("shortest_image_edge",)),
    ("keys as number", "gr00t_n1_7", value(*LATER, "action", "modality_keys", to=3), FILE, ("modality_keys",)),
    (
        "robot as text",
        "gr00t_n1_7",
        value("embodiment_id.json", "new_embodiment", to="1"),
        FILE,
        ("embodiment_id.json",),
    ),
    # shards and links
    ("a shard above", "openvla", index({"a": "../outside.safetensors"}), FILE, (INDEX, "../outside.safetensors")),
    ("an absolute shard", "openvla", index({"a": "/etc/x.safetensors"}), FILE, (INDEX, "/etc/x.safetensors")),
    ("a number as shard", "openvla", index({"a": 5}), FILE, (INDEX, "'a'")),
    ("a list of shards", "openvla", index(["model.safetensors"]), FILE, (INDEX, "weight_map")),
    ("nested index", "openvla", text(INDEX, NESTED), FILE, (INDEX, "nested")),
    ("linked weights", "openvla", link(WEIGHTS), FILE, (WEIGHTS, "outside")),
    ("linked config", "gr00t", link(CONFIG), FILE, (CONFIG, "outside")),
    ("a linked folder", "gr00t", link("experiment_cfg"), FILE, ("experiment_cfg", "outside")),
    # weights
    ("NaN weight", "openvla", tensor(poisoned(NAN)), "weights-not-finite", (WEIGHTS, "vision_backbone")),
    ("infinite weight", "pi0", tensor(poisoned(INF)), "weights-not-finite", (WEIGHTS, "state_proj")),
    ("minus infinity", "gr00t", tensor(poisoned(-INF)), "weights-not-finite", (WEIGHTS, "backbone")),
    ("NaN critic", "pi0", tensor(poisoned(NAN), "value_head.safetensors"), "weights-not-finite", ("value_head", "out")),
    (
        "8-bit floats",
        "pi0",
        tensor(lambda weight: weight.to(torch.float8_e4m3fn)),
        "weights-quantised",
        ("float8", "state_proj"),
    ),
    ("integers", "pi0", tensor(lambda weight: weight.to(torch.int64)), "weights-quantised", ("int64", "state_proj")),
    ("another shape", "pi0", tensor(lambda weight: weight[:1]), "weights-mismatch", ("state_proj",)),
    ("weights cut short", "openvla", truncated, "policy-file", (WEIGHTS,)),
    ("a header of exabytes", "openvla", text(WEIGHTS, b"\xff" * 7 + b"\x7f" + b"{}"), "policy-file", (WEIGHTS,)),
    (
        "a nested header",
        "openvla",
        text(WEIGHTS, (10**5).to_bytes(8, "little") + b"[" * 10**5),
        "policy-file",
        (WEIGHTS,),
    ),
    # tokenizer
    ("no tokenizer", "gr00t", text("tokenizer.json", '{"version": 7}'), FILE, ("tokenizer.json",)),
    ("a nested tokenizer", "openvla", text("tokenizer.json", NESTED), FILE, ("tokenizer.json",)),
]


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(("family", "edit", "code", "named"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_is_refused_by_name(
    saved: dict[str, Path], tmp_path: Path, family: str, edit: Edit, code: str, named: tuple[str, ...]
) -> None:
    directory = tmp_path / family
    shutil.copytree(saved[family], directory)
    (directory / CHECKSUMS).unlink()
    edit(directory)
    with raises_code(code, CheckpointError) as caught:
        load(family, directory)
    assert all(name in str(caught.value) for name in (*named, str(directory))), caught.value


def load(family: str, directory: Path) -> object:
    config = tiny_config(family, model_path=str(directory))
    return build_policy(config, device="cpu", dtype=torch.float32, seed=0)[1]


def flipped(file: str, place: float) -> Edit:
    def edit(directory: Path) -> None:
        content = bytearray((directory / file).read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        (directory / file).write_bytes(content)

    return edit


@pytest.mark.parametrize("family", list(STATS))
@pytest.mark.parametrize(
    ("file", "edit"),
    [
        *((WEIGHTS, flipped(WEIGHTS, place)) for place in (0.0, 0.5, 1.0)),
        ("value_head.safetensors", flipped("value_head.safetensors", 0.9)),
        (CONFIG, flipped(CONFIG, 0.5)),
        ("tokenizer.json", flipped("tokenizer.json", 0.5)),
        (WEIGHTS, truncated),
        ("tokenizer.json", lambda directory: (directory / "tokenizer.json").unlink()),
    ],
    ids=["header", "middle", "end", "head", "config", "tokenizer", "cut", "missing"],
)
def test_a_changed_file_of_a_saved_policy_is_found(
    saved: dict[str, Path], tmp_path: Path, family: str, file: str, edit: Edit
) -> None:
    directory = tmp_path / family
    shutil.copytree(saved[family], directory)
    edit(directory)
    with raises_code("file-damaged") as caught:
        load(family, directory)
    assert f"{file}: " in str(caught.value)


def test_a_policy_without_checksums_loads_and_the_report_says_so(saved: dict[str, Path], tmp_path: Path) -> None:
    assert "compared with checksums.json" in load("pi0", saved["pi0"]).describe()
    shutil.copytree(saved["pi0"], tmp_path / "pi0", ignore=shutil.ignore_patterns(CHECKSUMS))
    assert "no checksums" in load("pi0", tmp_path / "pi0").describe()


def test_links_of_the_hubs_cache_are_followed(saved: dict[str, Path], tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--policy"
    snapshot = repository / "snapshots" / "0123abc"
    shutil.copytree(saved["openvla"], snapshot)
    (repository / "blobs").mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(repository / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    assert load("openvla", snapshot).ok
    (snapshot / "merges.txt").symlink_to("../../../elsewhere")
    with raises_code("policy-file"):
        load("openvla", snapshot)


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to("b.json")
    (tmp_path / "b.json").symlink_to("a.json")
    check_links(tmp_path)


def test_finite_weights_whose_sum_overflows_are_taken(saved: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(saved["pi0"], tmp_path / "pi0", ignore=shutil.ignore_patterns(CHECKSUMS))
    tensor(lambda weight: torch.full_like(weight, 3e38))(tmp_path / "pi0")
    assert load("pi0", tmp_path / "pi0").ok


def test_card_and_checksums_appear_in_one_step_with_the_policy(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, policy = load_config(["env=toy"]).config, build("pi0")
    export_policy(policy, tmp_path / "policy", config, iteration=3)
    listed = json.loads((tmp_path / "policy" / CHECKSUMS).read_text())
    files = {p.relative_to(tmp_path / "policy").as_posix() for p in (tmp_path / "policy").rglob("*") if p.is_file()}
    assert set(listed) == files - {CHECKSUMS} and "embodrl.json" in listed
    assert check_checksums(tmp_path / "policy")

    def fail(*_: object) -> None:
        raise OutputError("disk full")

    monkeypatch.setattr("embodrl.trainer.files.write_json_file", fail)
    with raises_code("output"):
        export_policy(policy, tmp_path / "policy", config, iteration=4)
    assert json.loads((tmp_path / "policy" / "embodrl.json").read_text())["iteration"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
