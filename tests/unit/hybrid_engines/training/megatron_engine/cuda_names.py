"""Stand-ins for the CUDA names that parts of megatron-core use where CPU tensors would do as well.

For tests alone: with them the distributed optimizer runs on the CPU, over gloo, for what it
computes to be compared. Nothing here says how fast or how large anything is on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KINDS = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}


def install() -> None:
    """Replace the names in this process."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    real = Tensor.type

    def kind(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return KINDS.get(self.dtype) or real(self) if dtype is None else real(self, dtype, *args, **kwargs)

    Tensor.type = kind  # pyright: ignore[reportAttributeAccessIssue]
    tensor = torch.tensor

    def make(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return tensor(*args, device="cpu" if device == "cuda" else device, **kwargs)

    torch.tensor = make
