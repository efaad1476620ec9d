"""Batches of trajectories to and from the dictionaries of verl and AReaL; neither has to be installed.

python examples/batches/convert.py
"""

import torch

import embodrl


def main() -> None:
    """Convert a batch of four trajectories of three steps both ways."""
    batch = embodrl.TrajectoryBatch(
        {"rewards": torch.rand(3, 4, 8), "logprobs": torch.rand(3, 4, 8, 7)}, batch_size=[3, 4]
    )

    parts = embodrl.to_verl(batch)  # verl: DataProto(**parts) after TensorDict(parts["batch"], batch_size=4)
    print("verl:", {name: tuple(value.shape) for name, value in parts["batch"].items()})
    assert torch.equal(embodrl.from_verl(parts).rewards, batch.rewards)

    trajectories = embodrl.to_areal(batch)
    print("areal:", sorted(name for name in trajectories if name != "embodrl"))
    assert torch.equal(embodrl.from_areal(trajectories).rewards, batch.rewards)


if __name__ == "__main__":
    main()
