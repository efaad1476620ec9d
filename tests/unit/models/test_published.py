"""Published LIBERO fine-tunes of OpenVLA act in LIBERO only with the conventions that they were trained with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from expect import raises_code

from embodrl.config import load_config

HUB = "openvla/openvla-7b-finetuned-libero-10"
PRESETS = ("env=libero_10", "cluster.device=cpu")
GRIPPER, CROP = "interfaces-agree", "libero-checkpoint-was-cropped"


def checkpoint(directory: Path, key: str, lowest: float, file: str = "dataset_statistics.json") -> Path:
    """Write the files of a checkpoint that its statistics are in; seven dimensions, the last the gripper."""
    action = {name: [-0.9] * 6 + [lowest] for name in ("min", "q01")} | {"max": [1.0] * 7, "mask": [True] * 6 + [False]}
    sets = {key: {"action": action}}
    directory.mkdir(exist_ok=True)
    content = {"norm_stats": sets} if file == "config.json" else sets
    (directory / "config.json").write_text("{}")
    (directory / file).write_text(json.dumps(content))
    return directory


def codes(*arguments: str) -> set[str]:
    """Return the codes of the notes on a configuration."""
    return {note.code for note in load_config([*PRESETS, *arguments]).notes}  # no verb: nothing is fetched


@pytest.mark.parametrize("model", ["openvla_7b", "openvla_oft"])
@pytest.mark.parametrize("gripper", [(), ("model.gripper=bridge",)])
def test_statistics_of_libero_are_refused_with_another_gripper(tmp_path: Path, model: str, gripper: tuple[str, ...]):
    path = checkpoint(tmp_path / "weights", "libero_spatial_no_noops", 0.0)
    wrong = (
        *PRESETS,
        f"model={model}",
        "model.num_action_chunks=1",
        f"model.model_path={path}",
        "model.center_crop=true",
    )
    for verb in ("eval", "train"):
        with raises_code(GRIPPER) as caught:
            load_config([*wrong, *gripper], verb=verb)
        [problem] = [each for each in caught.value.problems if each.code == GRIPPER]
        assert problem.key == "model.gripper" and problem.hint == "set model.gripper=libero"
    codes(*wrong, "model.gripper=libero")


@pytest.mark.parametrize("file", ["dataset_statistics.json", "config.json"])
def test_the_key_is_found_with_its_suffix_and_in_either_file(tmp_path: Path, file: str):
    path = checkpoint(tmp_path / "weights", "libero_10_no_noops", 0.0, file)
    arguments = ["model=openvla_7b", f"model.model_path={path}", "model.unnorm_key=libero_10"]
    with raises_code(GRIPPER):  # said in so many words, and yet it would never open
        load_config([*PRESETS, *arguments, "model.gripper=as_is"])


def test_hub_names_are_refused_unless_the_user_says_otherwise():
    for arguments in ((f"model.model_path={HUB}",), ("model.model_path=me/mine", "model.unnorm_key=libero_goal")):
        with raises_code(GRIPPER):
            load_config([*PRESETS, "model=openvla_7b", *arguments])
        load_config([*PRESETS, "model=openvla_7b", *arguments, "model.gripper=as_is"])


def test_what_is_not_of_libero_or_opens_as_it_is_passes(tmp_path: Path):
    path = checkpoint(tmp_path / "own", "libero_spatial", -1.0)
    codes("model=openvla_7b", f"model.model_path={path}")  # -1 in its statistics opens the gripper
    with raises_code("interfaces-agree"):  # not because of LIBERO's gripper
        codes("model=openvla_7b", "model.model_path=openvla/openvla-7b", "model.unnorm_key=bridge_orig")
    with raises_code("interfaces-agree"):
        load_config(["env=maniskill", "model=openvla_7b", f"model.model_path={HUB}"])
    trained = checkpoint(tmp_path / "libero-policy", "libero_spatial", 0.0)
    (trained / "embodrl.json").write_text("{}")  # fine-tuned here, on LIBERO's own commands
    codes("model=openvla_7b", f"model.model_path={trained}")


def test_the_missing_crop_is_noted():
    arguments = ("model=openvla_7b", f"model.model_path={HUB}", "model.gripper=libero")
    assert CROP in codes(*arguments)
    assert CROP not in codes(*arguments, "model.center_crop=true")
    assert CROP not in codes(*arguments, "model.center_crop=false")  # meant


def test_weights_that_train_in_bf16_are_noted():
    code = "bf16-weights-lose-updates"

    def noted(verb: str, *arguments: str) -> bool:
        loaded = load_config(["env=toy", "model=openvla", "actor.param_dtype=bf16", *arguments], verb=verb)
        return code in {note.code for note in loaded.notes}

    alone = "actor.optim.master_weights=false"
    assert noted("train", alone) and noted("sft", alone, "model.warm_start=null")
    assert noted("train", alone, "model.trainable=head") and not noted("train")
    assert not noted("train", alone, "model.trainable=lora") and not noted("train", "actor.param_dtype=fp32")
    assert not noted("eval")  # nothing trains
