"""A frozen DINOv2 as the eyes of a small policy: features of a layer, computed once per observation and then stored.

DINOv2: Oquab et al. 2023, "DINOv2: Learning Robust Visual Features without Supervision", arXiv 2304.07193. Shapes:
B batch, V cameras, H image side, W width of the encoder, P = 16 cells of a picture.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.errors import CheckpointError
from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import CONFIG_FILE, read_file, size
from embodrl.models.common.images import normalize
from embodrl.models.gaussian.spec import CELL_WIDTH, GRID, PATCH_SIZE
from embodrl.storage.integrity import check_checksums

if TYPE_CHECKING:
    from transformers import Dinov2Config, PreTrainedModel

PATCHES = "patches"
"""Name of the features among the policy's inputs, in place of images."""
ENCODER_DIR = "encoder"
"""Folder of the encoder in the policy's directory."""
SETTING = "model.gaussian.frozen_encoder"
PICTURES_AT_ONCE = 64
IDENTITY_BYTES = 32
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)
_SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "image_size": 518}
_HINT = "give a directory with the config.json and model.safetensors of a DINOv2 in transformers' layout (Dinov2Model)"


class FrozenEncoder:
    """The first layers of a DINOv2, without its final norm, which belongs to its last layer.

    No ``nn.Module``, so that a policy that has one neither trains, shards, sends nor checkpoints its weights; copies of
    the policy share it. Its weights are float32; it computes in the precision of the rollout.

    Attributes:
        width: W.
        layer: number of layers.
        identity: SHA-256 of the weights, ``uint8[32]``; zeros on the meta device.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        self._network: Any = network.eval().requires_grad_(False)
        self.width: int = network.config.hidden_size
        self.layer: int = network.config.num_hidden_layers
        self.identity = _identity(network)

    def __deepcopy__(self, memo: dict[int, object]) -> FrozenEncoder:
        return self

    @classmethod
    def load(cls, directory: Path, layer: int, device: torch.device) -> FrozenEncoder:
        """Load the first ``layer`` layers of a DINOv2.

        On the meta device one that is not at hand, still on the hub or gone since a policy was trained, has the shapes
        of a DINOv2-S.

        Raises:
            CheckpointError: it is of another kind, has fewer layers, or its weights do not fit its config.json.
            PolicyFileError: a file is damaged, missing, or a link that leaves the directory.
        """
        checkpoint.check_links(directory)
        is_at_hand = device.type != "meta" or directory.is_dir()
        sizes = _read_sizes(directory / CONFIG_FILE) if is_at_hand else _SMALL
        if layer > sizes["num_hidden_layers"]:
            raise CheckpointError(
                f"model.gaussian.encoder_layer is {layer}, but the encoder in {directory} has"
                f" {sizes['num_hidden_layers']} layers",
                f"set it to {sizes['num_hidden_layers']} or less",
                code="frozen-encoder-layer",
            )
        network: Any = _read_network(directory, sizes, device)
        network.encoder.layer = network.encoder.layer[:layer]
        network.config = _config({**sizes, "num_hidden_layers": layer})
        return cls(network.to(device))

    @classmethod
    def of_policy(cls, directory: Path, layer: int, device: torch.device) -> FrozenEncoder:
        """Load the encoder that ``save`` wrote into a policy's directory; see ``load``."""
        check_checksums(directory, [f"{ENCODER_DIR}/{name}" for name in (CONFIG_FILE, checkpoint.SINGLE_FILE)])
        return cls.load(directory / ENCODER_DIR, layer, device)

    def save(self, directory: Path) -> None:
        """Write the encoder, in transformers' layout, into the directory of a policy; OSError if it can't be."""
        target = directory / ENCODER_DIR
        try:
            self._network.save_pretrained(target)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        shutil.copymode(target / CONFIG_FILE, target / checkpoint.SINGLE_FILE)  # the library's writer ignores the umask

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return features ``float16[B,V,P,W]``, averaged over cells, of ``uint8[B,V,H,H,3]``."""
        self._network.to(images.device)
        parts = [self._cells(part) for part in images.flatten(0, 1).split(PICTURES_AT_ONCE)]
        return torch.cat(parts).unflatten(0, images.shape[:2]).half()

    def _cells(self, images: Tensor) -> Tensor:
        mean, std = (torch.tensor(x, device=images.device) for x in (_MEAN, _STD))
        seen = self._network.embeddings(normalize(images, mean, std))
        patches = self._network.encoder(seen).last_hidden_state[:, 1:]
        side = images.shape[1] // PATCH_SIZE
        grid = patches.transpose(1, 2).unflatten(2, (side, side))
        return F.adaptive_avg_pool2d(grid, GRID).flatten(2).transpose(1, 2)


class PatchHead(nn.Module):
    """The trained part behind a frozen encoder: ``float16[B,V,P,W]`` to ``float32[B,feature_dim]``."""

    def __init__(self, num_cameras: int, width: int, feature_dim: int) -> None:
        super().__init__()
        self.cell_norm = nn.LayerNorm(width)
        self.cell = nn.Linear(width, CELL_WIDTH)
        self.proj = nn.Linear(num_cameras * GRID * GRID * CELL_WIDTH, feature_dim)
        self.norm = nn.LayerNorm(feature_dim)

    def forward(self, patches: Tensor) -> Tensor:
        x = F.relu(self.cell(self.cell_norm(patches.float())))
        return torch.tanh(self.norm(self.proj(x.flatten(1))))


def _read_sizes(path: Path) -> dict[str, Any]:
    """Return the dimensions in config.json, by the names and with the defaults of ``Dinov2Config``."""
    fields = read_file(path)
    kind = fields.text("model_type", None)
    if kind != "dinov2":
        raise CheckpointError(f"{path} is of {kind or 'no known kind'}, not dinov2", _HINT, code="frozen-encoder-kind")
    width = size(fields, "hidden_size", 768)
    heads = size(fields, "num_attention_heads", 12)
    if width % heads:
        fields.refuse(f"'hidden_size' is {width}, not a multiple of 'num_attention_heads' = {heads}")
    if (act := fields.text("hidden_act", "gelu")) != "gelu":
        fields.refuse(f"'hidden_act' is '{act}', not gelu")
    return {
        "hidden_size": width,
        "num_hidden_layers": size(fields, "num_hidden_layers", 12),
        "num_attention_heads": heads,
        "mlp_ratio": fields.integer("mlp_ratio", 4, low=1, high=64),
        "image_size": fields.integer("image_size", 224, low=PATCH_SIZE, high=4096),
        "patch_size": fields.integer("patch_size", PATCH_SIZE, low=PATCH_SIZE, high=PATCH_SIZE),
        "layer_norm_eps": fields.number("layer_norm_eps", 1e-6, low=0.0, high=1.0),
        "qkv_bias": fields.flag("qkv_bias", True),
        "use_swiglu_ffn": fields.flag("use_swiglu_ffn", False),
        "use_mask_token": fields.flag("use_mask_token", True),
    }


def _config(sizes: dict[str, Any]) -> Dinov2Config:
    from transformers import Dinov2Config

    return Dinov2Config(**sizes)


def _read_network(directory: Path, sizes: dict[str, Any], device: torch.device) -> PreTrainedModel:
    """Return the whole network, on the CPU; without weights if ``device`` is meta."""
    from transformers import Dinov2Model  # 2.5 s in every process
    from transformers.utils import logging

    if device.type == "meta":
        with device:
            return Dinov2Model(_config(sizes))
    files = checkpoint.weight_files(directory)
    checkpoint.stored_shapes(files)  # refuses damaged files
    logging.disable_progress_bar()
    # transformers maps layer names, which differ between its versions and public checkpoints.
    load: Any = Dinov2Model.from_pretrained
    network, found = load(
        directory,
        config=_config(sizes),
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # reported
        output_loading_info=True,
    )
    problems = [
        f"{kind.split('_')[0]}: {', '.join(map(str, sorted(names)[:3]))}" for kind, names in found.items() if names
    ]
    if not problems and not all(bool(tensor.isfinite().all()) for tensor in network.state_dict().values()):
        problems = ["some are NaN or infinite"]
    if problems:
        raise CheckpointError(
            f"the weights in {directory} do not fit its {CONFIG_FILE}: {'; '.join(problems)}",
            _HINT,
            code="frozen-encoder-weights",
        )
    return network


def _identity(network: nn.Module) -> Tensor:
    tensors = list(network.state_dict().values())
    if tensors[0].is_meta:
        return torch.zeros(IDENTITY_BYTES, dtype=torch.uint8, device="meta")
    # Without names, which differ between versions of transformers.
    parts = sorted(hashlib.sha256(tensor.cpu().numpy().tobytes()).digest() for tensor in tensors)
    return torch.frombuffer(bytearray(hashlib.sha256(b"".join(parts)).digest()), dtype=torch.uint8)
