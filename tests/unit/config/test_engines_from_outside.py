"""An engine of another package, with settings of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SPEC = """
from embodrl.rule_set import Finding, RuleSet
from embodrl.config.schema import PositiveInt, Section
from embodrl.specs import EngineSpec

RULES = RuleSet()

class FastConfig(Section):
    \"\"\"The fast engine.\"\"\"
    lanes: PositiveInt = 4

@RULES.rule("rollout.backend")
def fast_has_few_lanes(context):
    if context.config.rollout.fast.lanes > 8:
        yield Finding("rollout.fast.lanes", "is above 8", "lower it")

ENGINE = EngineSpec(name="fast", rollout="fast_engine:make", rollout_settings=FastConfig, rules=(RULES,))
"""


def validate(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *sys.path])}
    command = [sys.executable, "-m", "embodrl", "config", "validate", "env=toy", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)


def test_its_name_settings_and_rules_are_known(tmp_path: Path) -> None:
    info = tmp_path / "fast-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fast\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[embodrl.engines]\nfast = fast_engine:ENGINE\n")
    (tmp_path / "fast_engine.py").write_text(SPEC)
    good = validate(tmp_path, "rollout.backend=fast", "rollout.fast.lanes=8")
    assert good.returncode == 0, good.stderr
    refused = validate(tmp_path, "rollout.backend=fast", "rollout.fast.lanes=9")
    assert refused.returncode == 2 and "code:     fast-has-few-lanes" in refused.stderr, refused.stderr
    wrong = {
        "rollout.backend=fas": ("rollout.backend", "config-choice"),
        "rollout.fast.lanes=0": ("rollout.fast.lanes", "config-range"),
        "rollout.fast.lane=3": ("rollout.fast.lane", "config-unknown-key"),
        "rollout.fst.lanes=3": ("rollout.fst", "config-unknown-key"),
    }
    refused = validate(tmp_path, *wrong)
    assert refused.returncode == 2
    problems = re.split(r"^\d+\. ", refused.stderr, flags=re.MULTILINE)[1:]
    found = {problem.partition(":")[0]: problem for problem in problems}
    assert found.keys() == {key for key, _ in wrong.values()}
    for key, code in wrong.values():
        assert f"code:     {code}" in found[key] and "fast" in found[key].partition("nearest:")[2] + key


def test_a_misspelt_section_of_an_engine_is_answered_with_its_name() -> None:
    refused = validate(Path.cwd(), "rollout.vlm.max_num_seqs=3")
    assert "nearest:  rollout.vllm" in refused.stderr
