"""What `embodrl serve` says that it serves."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from embodrl.config.schema import Config
from embodrl.serving.verb import describe


def lines(source=None, **model) -> str:
    config = Config()
    return "\n".join(describe(config.model_copy(update={"model": config.model.model_copy(update=model)}), source))


def test_the_policy_and_its_cameras_are_named():
    source = SimpleNamespace(checkpoint=SimpleNamespace(path=Path("outputs/a/checkpoints/step_3")))
    assert "openvla of outputs/a/checkpoints/step_3\n" in lines(source)
    (camera,) = Config().env.cameras
    assert f"{camera.name} {camera.height} x {camera.width}; state: none" in lines()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, "as shipped"),
        ({"warm_start": None}, "random weights"),
        ({"warm_start": "data/policy"}, "of data/policy"),
        ({"model_path": "data/policy"}, "of data/policy"),
    ],
)
def test_where_weights_come_from_is_said(model, said):
    assert said in lines(**model).splitlines()[0]
