"""Run by an interpreter that has the package lerobot (0.4): reads our dataset and writes one of its own.

lerobot_check.py read DIRECTORY FILE.npz     what LeRobotDataset gives, frame by frame
lerobot_check.py write DIRECTORY FILE.npz    a dataset made by LeRobotDataset, and what went into it
"""

import sys

import numpy as np
import torch

# A torchvision built for CUDA has no operators beside a CPU torch, and asks for them; LeRobotDataset uses none.
_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import av  # noqa: E402
from lerobot.datasets import lerobot_dataset  # noqa: E402


def decode(path, timestamps, tolerance_s, backend=None):
    """As lerobot's own, by PyAV: which of its decoders work depends on the versions of torchcodec and torchvision."""
    with av.open(str(path)) as container:
        frames = [(float(frame.pts * frame.time_base), frame) for frame in container.decode(video=0)]
    chosen = [min(frames, key=lambda found: abs(found[0] - at)) for at in timestamps]
    assert all(abs(found[0] - at) < tolerance_s for found, at in zip(chosen, timestamps, strict=True))
    return torch.stack(
        [torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1) / 255 for _, frame in chosen]
    )


lerobot_dataset.decode_video_frames = decode


def read(directory: str, output: str) -> None:
    data = lerobot_dataset.LeRobotDataset("local/demos", root=directory)
    items = [data[i] for i in range(len(data))]
    result = {
        name: np.stack([item[name].numpy() for item in items])
        for name in items[0]
        if isinstance(items[0][name], torch.Tensor)
    }
    result["task"] = np.array([item["task"] for item in items])
    result |= {f"stats/{f}/{s}": value for f, stats in data.meta.stats.items() for s, value in stats.items()}
    chunks = lerobot_dataset.LeRobotDataset(
        "local/demos", root=directory, delta_timestamps={"action": [0.0, 1 / data.fps, 2 / data.fps]}
    )
    result["chunks"] = np.stack([chunks[i]["action"].numpy() for i in range(len(chunks))])
    result["is_pad"] = np.stack([chunks[i]["action_is_pad"].numpy() for i in range(len(chunks))])
    np.savez(output, **result)


def write(directory: str, output: str) -> None:
    rng = np.random.default_rng(0)
    features = {
        "observation.images.top": {"dtype": "image", "shape": (12, 16, 3), "names": ["height", "width", "channels"]},
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["a", "b", "c"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    }
    data = lerobot_dataset.LeRobotDataset.create("local/mine", 10, features, root=directory, use_videos=False)
    pictures, states, actions = [], [], []
    for number, length in enumerate((3, 2)):
        for _ in range(length):
            pictures.append(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            states.append(rng.normal(size=3).astype(np.float32))
            actions.append(rng.normal(size=2).astype(np.float32))
            frame = {"observation.images.top": pictures[-1], "observation.state": states[-1], "action": actions[-1]}
            data.add_frame(frame | {"task": f"task {number}"})
        data.save_episode()
    data.finalize()
    np.savez(output, pictures=np.stack(pictures), states=np.stack(states), actions=np.stack(actions))


if __name__ == "__main__":
    {"read": read, "write": write}[sys.argv[1]](sys.argv[2], sys.argv[3])
