"""How the benchmark of modes compares two runs."""

import importlib.util
import math
from pathlib import Path

import pytest

PATH = Path(__file__).parents[3] / "benchmarks" / "modes.py"


@pytest.fixture(scope="module")
def modes():
    spec = importlib.util.spec_from_file_location("modes_benchmark", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(policy_loss, value_loss=0.5, **more):
    named = {"train/policy_loss": policy_loss, "train/value_loss": value_loss, "env_steps": 800, "time/total_s": 3.0}
    return named | more


def test_the_largest_difference_of_a_loss_counts(modes):
    found = modes.compare([row(0.1), row(0.2, 0.4)], [row(0.1), row(0.25, 0.5)])
    assert math.isclose(found["difference"], 0.1) and not found["same_to_the_bit"]
    assert found["losses"] == [[0.1, 0.5], [0.2, 0.4]] and found["env_steps"] == 800 and found["iteration_s"] == 3.0


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({}, True),
        ({"time/total_s": 9.0}, True),  # takes longer
        ({"rollout/restarts": 1}, True),  # is not a result of training
        ({"env_steps": 801}, False),
        ({"train/grad_norm": 1.0 + 2**-52}, False),
    ],
)
def test_bit_exact_means_what_training_gives(modes, other, same):
    reference = [row(0.1, **{"train/grad_norm": 1.0})]
    found = modes.compare([reference[0] | other], reference)
    assert found["same_to_the_bit"] is same and found["difference"] == 0.0


def test_a_figure_that_is_not_there_is_not_the_same(modes):
    assert not modes.compare([row(0.1)], [row(0.1, **{"train/grad_norm": 1.0})])["same_to_the_bit"]


def test_runs_of_other_lengths_are_not_compared(modes):
    with pytest.raises(ValueError):
        modes.compare([row(0.1)], [row(0.1), row(0.2)])
