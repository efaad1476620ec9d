"""scripts/make_warm_start.sh with a stand-in for embodrl: where the policy ends, and what is left of its card."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from embodrl.config import load_config
from embodrl.config.policy_card import ASSETS

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "make_warm_start.sh"
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> LOG
for word in "$@"; do
    case $word in
        sft.output_dir=*)
            mkdir -p "${word#*=}/policy"
            for file in sft_metrics.jsonl policy/embodrl.json policy/checksums.json policy/model.safetensors; do
                echo '{}' > "${word#*=}/$file"
            done ;;
    esac
done
"""


@pytest.mark.parametrize("model", ["openvla", "openvla_oft"])
def test_a_policy_can_be_made_in_a_place_that_is_not_there_yet(tmp_path: Path, model: str) -> None:
    log, stand_in, target = tmp_path / "log", tmp_path / "embodrl", tmp_path / "new" / "policy"
    stand_in.write_text(STAND_IN.replace("LOG", str(log)))
    stand_in.chmod(0o755)
    here = {"WARM_START_DIR": str(tmp_path / "work"), "WARM_START_TARGET": str(target), "EMBODRL": str(stand_in)}
    subprocess.run(["bash", str(SCRIPT), model, "sft.max_steps=7"], env=os.environ | here, check=True)
    assert sorted(path.name for path in target.iterdir()) == ["embodrl.json", "model.safetensors"]
    assert (target / "embodrl.json").read_text() == (ASSETS / "openvla_tiny" / "embodrl.json").read_text()
    commands = [line.split() for line in log.read_text().splitlines()]
    assert [words[0] for words in commands] == ["collect", "sft", "eval", "eval"]
    assert [words[0] for words in commands if f"model={model}" in words] == ["sft", "eval", "eval"]
    assert "sft.max_steps=7" in commands[1]
    for words in commands:
        load_config([word for word in words[1:] if "=" in word and "warm_start=/" not in word])
