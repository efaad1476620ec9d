"""How `embodrl serve` ends when its model hangs; see docs/serving.md."""

from pathlib import Path

import pytest
import runs

pytest.importorskip("aiohttp", reason="the extra serve is not installed")
pytest.importorskip("msgpack", reason="the extra serve is not installed")

SCRIPT = """
import asyncio, ctypes, os, subprocess, sys, threading, time
sys.path.insert(0, HELPERS)
from served import TOKEN, MeanPolicy, raw, websocket
from embodrl.processes.ending import own_process
from embodrl.pipelines.load import load_config
from embodrl.serving import verb

class Hangs(MeanPolicy):
    def predict_action_batch(self, observation, *arguments, **settings):
        if observation.instruction == ["hang"]:
            STOP and subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -TERM {os.getpid()}"])
            HANG
        return super().predict_action_batch(observation, *arguments, **settings)

async def ask(url):
    async with websocket(url) as socket:
        await socket.receive_bytes()
        image = {b"__ndarray__": True, b"data": bytes(48), b"dtype": "|u1", b"shape": [4, 4, 3]}
        await socket.send_bytes(raw({"observation/base_camera": image, "prompt": "hang"}))
        await socket.receive()
        await asyncio.sleep(1000)  # it does not answer that the server closes

def say(line):
    print(line, flush=True)
    if line.startswith("listening"):
        threading.Thread(target=asyncio.run, args=(ask(line.split()[-1]),), daemon=True).start()

own_process()
cameras = "env.cameras=[{name:base_camera,height:4,width:4}]"
settings = ["env=toy", cameras, "model.random_weights=true", "serve.port=0", f"serve.token={TOKEN}", *SETTINGS]
verb.build_policy = lambda config: Hangs()
sys.exit(verb.serve(load_config(settings, verb="serve"), say=say))
"""


def hung(tmp_path: Path, hang: str, *settings: str, stop: bool = True) -> runs.Outcome:
    """Serve a policy that hangs at the first request, and return how the server ended."""
    path, text = tmp_path / "server.py", SCRIPT
    filled = {"HELPERS": repr(str(runs.HERE)), "STOP": str(stop), "HANG": hang, "SETTINGS": repr(settings)}
    for name, value in filled.items():
        text = text.replace(name, value)
    path.write_text(text)
    return runs.script(path, check=False, timeout_s=120)


@pytest.mark.long
def test_sigterm_ends_a_server_whose_model_hangs(tmp_path):
    done = hung(tmp_path, "time.sleep(1000)", "serve.drain_timeout_s=0.1")
    assert done.code == 1 and "stopping" in done.stdout
    assert "serve.drain_timeout_s" in done.stderr


@pytest.mark.long  # five seconds for closing
def test_sigterm_ends_a_server_whose_model_holds_the_interpreter_lock(tmp_path):
    done = hung(tmp_path, "ctypes.PyDLL(None).sleep(1000)", "serve.drain_timeout_s=0.1")
    assert done.code in (-15, -9) and "stopped-unsaved" in done.stderr


@pytest.mark.long
def test_a_server_whose_model_hangs_for_good_ends_by_itself(tmp_path):
    done = hung(tmp_path, "time.sleep(1000)", "serve.stall_timeout_s=0.2", stop=False)
    assert done.code == 1
    assert "no processor time" in done.stderr and "in predict_action_batch" in done.stderr
