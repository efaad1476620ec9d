"""Clients from their own packages complete episodes against `embodrl serve`, with the success of `embodrl eval`.

Needs an interpreter with openpi-client, vla-eval, json-numpy, requests, pyzmq and msgpack-numpy in the variable
EMBODRL_CLIENTS_PYTHON, and the extra serve; for lerobot's RobotClient, one with lerobot and grpcio in
EMBODRL_LEROBOT_PYTHON. GR00T's own client is no package: EMBODRL_GR00T_DIRS has checkouts of Isaac-GR00T (N1.6, N1.7),
joined as in PATH, and EMBODRL_GR00T_PYTHON an interpreter that can import gr00t.policy.server_client of each.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs

pytest.importorskip("aiohttp", reason="the extra serve is not installed")
pytest.importorskip("zmq", reason="the extra serve is not installed")
PYTHON = os.environ.get("EMBODRL_CLIENTS_PYTHON", "")
LEROBOT = os.environ.get("EMBODRL_LEROBOT_PYTHON", "")
GROOT = os.environ.get("EMBODRL_GR00T_PYTHON", "")
GROOT_DIRS = list(filter(None, os.environ.get("EMBODRL_GR00T_DIRS", "").split(os.pathsep))) if GROOT else []
HERE = Path(__file__).parent
EPISODES, SEED, TOKEN = 12, 1_000_000, "a-token-of-the-tests"
PROTOCOLS = {"openpi": PYTHON, "vla_eval": PYTHON, "gr00t": PYTHON or GROOT, "act": PYTHON, "lerobot": LEROBOT}
SPOKEN = tuple(name for name, python in PROTOCOLS.items() if python or (name == "act" and LEROBOT))
CONFIG = """
presets: {env: toy, model: cnn}
model: {num_action_chunks: 2}
env:
  tasks: [reach-red]
  max_episode_steps: 20
  include_state: false
  pin_cpus: false
  num_processes: 1
  eval: {total_num_envs: 4, num_episodes: 12, decoding: greedy}
  video: {enabled: false}
sft: {max_steps: 300, batch_size: 32, lr: 1.0e-3}
collect: {num_episodes: 60}
"""


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not SPOKEN, reason="no variable names an interpreter that has clients")
def test_clients_see_the_success_of_an_evaluation(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    common, sft, policy = ("-c", config), tmp_path / "sft", tmp_path / "sft" / "policy"
    for verb in ("collect", "sft"):
        settings = [f"collect.output_dir={tmp_path}/demos", f"sft.data_dir={tmp_path}/demos", f"sft.output_dir={sft}"]
        mine = [text for text in settings if text.startswith(verb)]
        assert runs.embodrl(verb, *common, *mine).code == 0
    assert runs.embodrl("eval", policy, *common, "-o", tmp_path / "eval").code == 0
    wanted = [bool(one["success"]) for one in json.loads((tmp_path / "eval" / "eval.json").read_text())["per_episode"]]
    assert 0 < sum(wanted) < EPISODES  # else equality would say little
    protocols = f"protocol={','.join(SPOKEN)}"
    server = runs.start("serve", policy, *common, protocols, "serve.port=0", f"serve.token={TOKEN}")
    try:
        urls = {}
        for line in server.stdout:
            if found := re.fullmatch(r"listening: (\w+) at (\S+)\n", line):
                urls[found[1]] = found[2]
            if line == "ready\n":
                break
        assert set(urls) == set(SPOKEN)
        for name, python, script, paths in clients(urls):
            command = [python, *script, TOKEN, str(EPISODES), str(SEED)]
            path = os.pathsep.join([*paths, str(HERE.parents[1])])
            environment = os.environ | {"PYTHONPATH": path, "HF_LEROBOT_HOME": str(tmp_path)}
            done = subprocess.run(
                command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
            )
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout.splitlines()[-1])
            if name == "lerobot":  # its client runs other actions of a chunk than an evaluation does
                assert len(found) == EPISODES
            else:
                assert found == wanted, (name, paths)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.communicate()


def clients(urls: dict[str, str]) -> Iterator[tuple[str, str, list[object], list[str]]]:
    """Yield the protocol, the interpreter, the script with its first arguments, and further paths of imports."""
    for name in SPOKEN:
        if name == "lerobot":
            yield name, LEROBOT, [HERE / "lerobot_robot.py", urls[name].removeprefix("grpc://"), urls["act"]], []
        elif PYTHON:
            yield name, PYTHON, [HERE / "serve_toy_client.py", name, urls[name]], []
    for directory in GROOT_DIRS:
        yield "gr00t", GROOT, [HERE / "gr00t_client.py", urls["gr00t"]], [directory]
