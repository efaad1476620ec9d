"""Arguments of `embodrl serve`, and what it refuses before anything is loaded."""

from pathlib import Path

import pytest
from expect import raises_code

from embodrl.cli.serve import arguments_of
from embodrl.pipelines.load import load_config


def test_policy_and_protocol_are_names_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("outputs/run").mkdir(parents=True)
    for given, wanted in {
        "outputs/run protocol=openpi,http": (Path("outputs/run"), ["serve.protocols=[openpi,http]"]),
        "env=toy policy=outputs/run": (Path("outputs/run"), ["env=toy"]),
        "policy=outputs/gone": (Path("outputs/gone"), []),
        "policy=OWNER/NAME model=pi05": (None, ["model.model_path=OWNER/NAME", "model=pi05"]),
        "protocol=[openpi] serve.port=1": (None, ["serve.protocols=[openpi]", "serve.port=1"]),
    }.items():
        assert arguments_of(given.split()) == wanted


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (["serve.protocols=[openpi,openpi]"], "served-protocols-have-ports"),
        (["serve.protocols=[gr00t]", "serve.gr00t.actions=['arm:6']"], "wire-keys-fit"),
        (["serve.protocols=[gr00t]", "serve.gr00t.actions=[arm,gripper]"], "wire-keys-fit"),
        (["env.cameras=[{name: a},{name: b}]", "serve.openpi.images=[a]"], "wire-keys-fit"),
        (
            ["serve.protocols=[lerobot]", "serve.tls_cert=pyproject.toml", "serve.tls_key=pyproject.toml"],
            "tls-has-both-files",
        ),
        (["serve=nothing"], "preset-unknown"),
        (["serve.protocols=[openpi,openai]"], "protocols-carry-what-the-policy-writes"),
        (["model=planner"], "protocols-carry-what-the-policy-writes"),
    ],
    ids=lambda part: str(part),
)
def test_what_is_refused(settings, code):
    with raises_code(code):
        load_config(["env=maniskill", "model=openvla", *settings], verb="serve")


@pytest.mark.parametrize("preset", ["libero", "droid", "aloha", "so101"])
def test_presets_serve_their_cameras(preset):
    count, protocols = (3, "[openpi,act]") if preset == "aloha" else (2, "[openpi,gr00t,lerobot]")
    cameras = ",".join(f"{{name: c{number}, height: 8, width: 8}}" for number in range(count))
    dims = {"libero": 7, "droid": 8, "aloha": 14, "so101": 6}[preset]
    settings = ["env=dataset", f"env.cameras=[{cameras}]", f"serve={preset}", f"model.action_dim={dims}"]
    settings += [
        "model=pi05",
        "model.random_weights=true",
        f"model.pi.num_images={count}",
        f"serve.protocols={protocols}",
    ]
    loaded = load_config(settings, verb="serve")
    assert len(loaded.config.serve.openpi.images) >= count and loaded.config.serve.openpi.instruction == "prompt"


def test_reaching_beyond_this_machine_is_noted():
    for settings, codes in (([], set()), (["serve.host=0.0.0.0"], {"served-to-other-machines"})):
        loaded = load_config(["env=maniskill", "model=openvla", *settings], verb="serve")
        assert {note.code for note in loaded.notes} == codes
