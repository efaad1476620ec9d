"""Public statistics, processors and prompts go through the loaders; the files lie outside the repository."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from safetensors.numpy import save_file

from embodrl.data.statistics import dimension_stats, read_statistics
from embodrl.models.gr00t.sidecars import EMBODIMENTS_FILE, PROCESSOR_FILE, STATISTICS_FILE, Sidecars
from embodrl.models.openpi.config import Normalization, PiConfig
from embodrl.models.openpi.processing import STATE_BINS, PiProcessor
from embodrl.models.openpi.stats import LEROBOT_AFTER_FILE, LEROBOT_FILE, choose, read_lerobot, read_openpi
from embodrl.models.openpi.tokenizer import TextTokenizer, with_line_feed
from embodrl.models.openvla.processing import PROMPT

REAL = Path(__file__).resolve().parents[4] / "shared" / "real_fixtures"
pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason=f"no {REAL}")


def test_statistics_of_the_gr1_set_are_those_that_it_brings() -> None:
    tables = [parquet.read_table(path) for path in sorted((REAL / "gr1_picknplace/data").rglob("*.parquet"))]
    stored = json.loads((REAL / "gr1_picknplace/meta/stats.json").read_text())
    for key in ("observation.state", "action"):
        values = np.concatenate([np.array(table[key].to_pylist(), np.float64) for table in tables])
        found, narrow = dimension_stats(values)
        assert values.shape == (2096, 44)
        moving = np.setdiff1d(np.arange(44), narrow)  # there quantiles are the ends of the range
        for name in ("mean", "std", "min", "max", "q01", "q99"):
            wanted = np.array(stored[key][name])
            np.testing.assert_allclose(
                np.array(found[name])[moving], wanted[moving], atol=1e-5, err_msg=f"{key} {name}"
            )
    read = read_statistics(REAL / "gr1_picknplace/meta/stats.json")
    assert read.state is not None and len(read.state["mean"]) == len(read.action["mean"]) == 44  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["pi05_libero", "pi05_simpler_bridge"])
@pytest.mark.parametrize("method", ["quantiles", "mean_std"])
def test_statistics_of_openpi_scale_states_and_actions(name: str, method: str, tmp_path: Path) -> None:
    target = tmp_path / "assets" / name / "norm_stats.json"
    target.parent.mkdir(parents=True)
    shutil.copyfile(REAL / f"openpi/{name}.norm_stats.json", target)
    stats = choose(read_openpi(tmp_path), None, Normalization(method, method, 1e-6), 7, name)  # type: ignore[arg-type]
    assert stats.key == name and stats.state is not None
    raw = json.loads(target.read_text())["norm_stats"]
    for part, scaling in (("state", stats.state), ("actions", stats.actions)):
        middle = np.array(raw[part]["mean"])
        scaled = scaling.normalize(middle)
        assert np.isfinite(scaled).all() and np.abs(scaled).max() <= 1.0
        np.testing.assert_allclose(scaling.unnormalize(scaled), middle, atol=1e-5)
    assert len(read_statistics(target).action["mean"]) == 7  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "method"),
    [("pi0", "mean_std"), ("pi05", "quantiles"), ("smolvla", "mean_std"), ("pi0_fast", "mean_std")],
)
def test_processors_of_lerobot_say_how_statistics_are_used(
    family: str, method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = REAL / "lerobot_processors"
    tensors = {
        f"{part}.{name}": np.full(6, value, np.float32)
        for part in ("observation.state", "action")
        for name, value in {"mean": 0.1, "std": 0.5, "q01": -1.0, "q99": 1.0}.items()
    }
    for side, name in (("pre", LEROBOT_FILE), ("post", LEROBOT_AFTER_FILE)):
        if (files / f"{family}_{side}.json").is_file():
            shutil.copyfile(files / f"{family}_{side}.json", tmp_path / name)
            for step in json.loads((tmp_path / name).read_text())["steps"]:
                if "state_file" in step:
                    save_file(tensors, tmp_path / step["state_file"])
    sets, methods = read_lerobot(tmp_path)
    assert methods == Normalization(method, method, 1e-8)  # type: ignore[arg-type]
    stats = choose(sets, None, methods, 6, family)
    assert stats.state is not None and np.isfinite(stats.state.normalize(np.zeros(6))).all()
    assert not caplog.records, "a step is not known"


def test_the_processor_of_gr00t_n1_7_says_what_the_robot_is(tmp_path: Path) -> None:
    shutil.copyfile(REAL / "gr00t_n1_7/processor_config.json", tmp_path / PROCESSOR_FILE)
    keys = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
    part = {
        key: {"min": [-1.0], "max": [1.0], "mean": [0.0], "std": [0.5], "q01": [-0.9], "q99": [0.9]} for key in keys
    }
    statistics = {"sim_behavior_r1_pro": {"state": part, "action": part}}
    (tmp_path / STATISTICS_FILE).write_text(json.dumps(statistics))
    (tmp_path / EMBODIMENTS_FILE).write_text(json.dumps({"sim_behavior_r1_pro": 24}))
    sidecars = Sidecars.read(tmp_path)
    robot = sidecars.robot(None, 7, "a test")
    assert (robot.horizon, robot.action.dims) == (16, 7)
    assert tuple(key.name for key in robot.action.keys) == keys and robot.state is not None
    images = sidecars.images()
    assert (images.side, images.crop) == (256, 243)
    config = sidecars.settings.fields("modality_configs").fields("sim_behavior_r1_pro")
    assert len(config.fields("video").texts("modality_keys")) == 2


class Letters(TextTokenizer):
    """One id a character, so that a prompt can be read back."""

    bos_id = 2
    vocab_size = 1 << 21

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def save(self, directory: Path) -> None:
        raise NotImplementedError


def test_prompts_are_the_texts_whose_ids_are_public() -> None:
    texts = {
        entry["name"]: entry["text"] for entry in json.loads((REAL / "tokenizers/ids.json").read_text())["prompts"]
    }
    bins = [128, 127, 3, 255, 0, 64, 200, 99]
    config = PiConfig(variant="pi05", max_action_dim=32, num_images=1, max_prompt_tokens=200, discrete_state=True)
    ids = PiProcessor(Letters(), config, None).prompt(texts["plain"], STATE_BINS[bins] + 1e-3)
    assert ids[0] == Letters.bos_id and "".join(map(chr, ids[1:])) == texts["pi05_state"]
    assert with_line_feed(texts["plain"]) == texts["newline"]
    assert PROMPT.format(instruction=texts["plain"]) == texts["openvla"]
