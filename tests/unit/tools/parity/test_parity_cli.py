"""`embodrl parity`: which fixtures are found, whose they are, what is printed, and the exit code."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import Result
from expect import raises_code
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from embodrl.cli.main import app
from embodrl.errors import UsageError
from embodrl.specs import MODELS
from embodrl.tools.parity.cli import family_of
from embodrl.tools.parity.common import Arithmetic, Comparison, compare, read_tensors

SHARED = Path(__file__).parents[5] / "shared" / "parity"
RECORDED = ("openvla", "openvla_oft", "pi0", "pi05", "gr00t_n1_5_action_head")
recorded = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no recorded reference outputs in {SHARED}")


def doubled(directory: Path) -> list[Comparison]:
    """A family whose network doubles its input."""
    weights, io = read_tensors(directory / "model.safetensors"), read_tensors(directory / "io.safetensors")
    found = io["x"] @ weights["w"]
    return [compare("y", found, io["y"], 1e-5), compare("ids", found.argmax(-1), io["ids"], 0.0)]


def nothing(directory: Path) -> list[Comparison]:
    """A family that compares nothing."""
    return []


@pytest.fixture(autouse=True)
def doubler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
    MODELS.add("doubler", "nowhere:build", parity=f"{__name__}:doubled")
    MODELS.add("nothing", "nowhere:build", parity=f"{__name__}:nothing")
    MODELS.add("no_recording", "nowhere:build")
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def make(directory: Path, **changes: torch.Tensor) -> Path:
    directory.mkdir(parents=True)
    x = torch.tensor([[1.0, -2.0, 0.5]])
    save_file({"w": 2 * torch.eye(3)}, directory / "model.safetensors")
    save_file({"x": x, "y": 2 * x, "ids": torch.tensor([0]), **changes}, directory / "io.safetensors")
    return directory


def parity(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["parity", *map(str, arguments)])


def test_a_fixture_that_is_reproduced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    outcome = parity(make(tmp_path / "doubler_small"), "--json", tmp_path / "out" / "errors.json")
    assert outcome.exit_code == 0, outcome.output
    lines = [line.split() for line in outcome.stdout.splitlines()]
    assert lines[0] == ["fixture", "family", "output", "max", "error", "tolerance", "verdict"]
    assert lines[1] == ["doubler_small", "doubler", "y", "0.0e+00", "1e-05", "ok"]
    assert lines[2] == ["doubler_small", "doubler", "ids", "0.0e+00", "0e+00", "ok"]
    assert "1 of 1 fixtures" in outcome.stdout
    content = json.loads((tmp_path / "out" / "errors.json").read_text())
    assert content["ok"] is True and content["fixtures"][0]["family"] == "doubler"
    first = content["fixtures"][0]["outputs"][0]
    assert first == {"name": "y", "max_error": 0.0, "tolerance": 1e-5, "scale": 4.0, "ok": True}
    assert content["precision"] == "fp32" and content["device"]


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"y": torch.tensor([[2.0, -4.001, 1.0]])}, "1.0e-03"),
        ({"y": torch.tensor([[2.0, torch.nan, 1.0]])}, "inf"),
        ({"y": torch.zeros(3)}, "inf"),
        ({"ids": torch.tensor([1])}, "1.0e+00"),
    ],
)
def test_an_output_out_of_tolerance(tmp_path: Path, changes: dict[str, torch.Tensor], shown: str) -> None:
    outcome = parity(make(tmp_path / "doubler", **changes), "--json", tmp_path / "errors.json")
    assert outcome.exit_code == 1
    [wrong] = [line for line in outcome.stdout.splitlines() if "OUT OF TOLERANCE" in line]
    assert shown in wrong
    content = json.loads((tmp_path / "errors.json").read_text())
    assert content["ok"] is False
    assert [one["ok"] for one in content["fixtures"][0]["outputs"]].count(False) == 1


@pytest.mark.parametrize("damage", ["torn", "no weights", "an input is missing", "another shape"])
def test_a_damaged_fixture_is_reported_beside_a_good_one(tmp_path: Path, damage: str) -> None:
    make(tmp_path / "all" / "doubler_good")
    bad = make(tmp_path / "all" / "doubler_bad")
    if damage == "torn":
        (bad / "io.safetensors").write_bytes((bad / "io.safetensors").read_bytes()[:-7])
    elif damage == "no weights":
        (bad / "model.safetensors").unlink()
    elif damage == "an input is missing":
        save_file({"y": torch.zeros(1)}, bad / "io.safetensors")
    else:
        save_file({"w": torch.eye(2)}, bad / "model.safetensors")
    outcome = parity(tmp_path / "all", "--json", tmp_path / "errors.json")
    assert outcome.exit_code == 1
    assert "1 of 2 fixtures" in outcome.stdout and "ERROR" in outcome.stdout
    assert f"error: {bad}: " in outcome.stderr and "hint:" in outcome.stderr and "Traceback" not in outcome.stderr
    failed, fine = json.loads((tmp_path / "errors.json").read_text())["fixtures"]
    assert fine["ok"] and not failed["ok"] and failed["error"]


def test_a_comparison_of_nothing_is_no_success(tmp_path: Path) -> None:
    outcome = parity(make(tmp_path / "x"), "--family", "nothing")
    assert outcome.exit_code == 1 and "nothing was compared" in outcome.stderr


def test_the_family_may_be_given(tmp_path: Path) -> None:
    assert parity(make(tmp_path / "recording"), "--family", "doubler").exit_code == 0
    outcome = parity(tmp_path / "recording", "--family", "dobler")
    assert outcome.exit_code == 2 and "did you mean 'doubler'?" in outcome.stderr


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("openvla", "openvla"),
        ("openvla_oft", "openvla_oft"),
        ("OpenVLA-OFT-libero", "openvla_oft"),
        ("pi0", "pi0"),
        ("pi05", "pi05"),
        ("my.pi05.recording", "pi05"),
        ("gr00t_n1_5_action_head", "gr00t"),
        ("gr00t_n1_7", "gr00t_n1_7"),
    ],
)
def test_the_longest_name_in_the_folders_name_counts(name: str, family: str) -> None:
    assert family_of(Path("/somewhere") / name) == family


@pytest.mark.parametrize("name", ["pi", "pi055", "openvl", "no_recording"])
def test_another_folder_is_of_no_family(name: str) -> None:
    with raises_code(
        "usage", UsageError, "openvla", "openvla_oft", "pi0", "pi05", "gr00t", "gr00t_n1_7", "smolvla", "doubler"
    ) as refused:
        family_of(Path(name))
    assert "--family" in refused.value.hint


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda path: None, "there is no directory"),
        (lambda path: path.mkdir(), "holds no fixture"),
        (lambda path: path.write_text("x"), "there is no directory"),
        (lambda path: make(path / "opnvla_oft"), "did you mean 'openvla_oft'?"),
    ],
)
def test_wrong_use_is_reported_before_anything_runs(tmp_path: Path, make_it, message: str) -> None:
    make_it(tmp_path / "x")
    outcome = parity(tmp_path / "x")
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert message in outcome.stderr and "hint:" in outcome.stderr


def test_results_that_can_not_be_written_are_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    outcome = parity(make(tmp_path / "doubler"), "--json", tmp_path / "file" / "errors.json")
    assert (outcome.exit_code, outcome.stdout) == (1, "") and "can't be written" in outcome.stderr


def test_bfloat16_is_judged_relative_to_the_output_and_not_by_choices(tmp_path: Path) -> None:
    x = torch.tensor([[100.1, -2.0, 0.5]])
    make(tmp_path / "doubler", x=x, y=2 * x, ids=torch.tensor([1]))
    assert parity(tmp_path / "doubler").exit_code == 1, "the ids differ"
    make(tmp_path / "doubler_good", x=x, y=2 * x)
    outcome = parity(tmp_path / "doubler_good", "--precision", "bf16", "--json", tmp_path / "errors.json")
    assert outcome.exit_code == 0, outcome.output
    content = json.loads((tmp_path / "errors.json").read_text())
    rounded = content["fixtures"][0]["outputs"][0]
    assert content["precision"] == "bf16" and 1e-5 < rounded["max_error"] < rounded["tolerance"]
    assert rounded["tolerance"] == pytest.approx(0.05 * 200.2) and rounded["scale"] == pytest.approx(200.2)


def test_a_chosen_token_has_no_tolerance_in_bfloat16() -> None:
    chosen = compare("tokens", torch.tensor([3]), torch.tensor([700]), 0.0, chosen=True)
    [exact] = Arithmetic().run(lambda directory: [chosen], Path())
    [rounded] = Arithmetic(precision="bf16").run(lambda directory: [chosen], Path())
    assert not exact.ok and rounded.ok
    [on_gpu] = Arithmetic(torch.device("cuda")).run(lambda directory, device: [chosen], Path())
    assert not on_gpu.ok


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here(tmp_path: Path) -> None:
    outcome = parity(make(tmp_path / "doubler"), "--device", "cuda")
    assert outcome.exit_code == 1 and "gpu-missing" in outcome.stderr
    outcome = parity(tmp_path / "doubler", "--device", "tpu")
    assert outcome.exit_code == 2 and "cpu" in outcome.stderr


@recorded
@pytest.mark.parametrize("name", RECORDED)
def test_the_recorded_fixtures(name: str, tmp_path: Path) -> None:
    outcome = parity(SHARED / name, "--json", tmp_path / "errors.json")
    assert outcome.exit_code == 0, outcome.output
    assert len(json.loads((tmp_path / "errors.json").read_text())["fixtures"][0]["outputs"]) >= 2


@recorded
@pytest.mark.parametrize("name", RECORDED)
def test_one_changed_number_is_noticed(name: str, tmp_path: Path) -> None:
    """Of each float output, or input that an output depends on, in the recording."""
    (tmp_path / name).mkdir()
    for file in (SHARED / name).iterdir():  # whose directory may be read-only
        shutil.copyfile(file, tmp_path / name / file.name)
    path = tmp_path / name / "io.safetensors"
    tensors = load_file(path)
    changed = {"openvla": "h", "openvla_oft": "h", "pi0": "a", "pi05": "a", "gr00t_n1_5_action_head": "v"}[name]
    tensors[changed].view(-1)[-1] += 1e-3
    save_file(tensors, path)
    outcome = parity(tmp_path / name)
    assert outcome.exit_code == 1 and "OUT OF TOLERANCE" in outcome.stdout
