"""Random shifts of pictures: against hand-checked ones, and reproducible from the generator."""

from __future__ import annotations

import pytest
import torch
from expect import raises_code
from torch.nn import functional as F

from embodrl.data.shifts import shifted, shifted_inputs
from embodrl.errors import EmbodrlError


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(rows: int, cameras: int, most: int) -> torch.Tensor:
    return torch.randint(-most, most + 1, (2, rows, cameras), generator=generator())


def test_a_shift_repeats_the_border() -> None:
    """All nine shifts by at most one pixel of one picture, written out for two of them."""
    picture = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3, 1)
    down, right = drawn(200, 1, 1)
    moved = shifted(picture.expand(200, 1, 3, 3, 1), 1, generator())[:, 0, :, :, 0]
    expected = {
        (1, 0): [[4, 5, 6], [7, 8, 9], [7, 8, 9]],
        (-1, 1): [[2, 3, 3], [2, 3, 3], [5, 6, 6]],
        (0, -1): [[1, 1, 2], [4, 4, 5], [7, 7, 8]],
        (0, 0): [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
    }
    for (y, x), numbers in expected.items():
        rows = (down == y) & (right == x)
        assert rows.any() and bool((moved[rows[:, 0]] == torch.tensor(numbers)).all())


@pytest.mark.parametrize("most", [1, 3, 6])
def test_shifts_are_crops_of_padded_pictures_and_leave_these_alone(most: int) -> None:
    images = torch.randint(0, 256, (9, 2, 8, 7, 3), dtype=torch.uint8, generator=generator(0))
    before = images.clone()
    moved = shifted(images, most, generator())
    down, right = drawn(9, 2, most)
    padded = F.pad(images.flatten(0, 1).permute(0, 3, 1, 2).float(), (most,) * 4, mode="replicate")
    for index, (y, x) in enumerate(zip((down + most).flatten(), (right + most).flatten(), strict=True)):
        crop = padded[index, :, y : y + 8, x : x + 7].permute(1, 2, 0).byte()
        assert torch.equal(moved.flatten(0, 1)[index], crop)
    assert torch.equal(images, before) and torch.equal(moved, shifted(images, most, generator()))


def test_shifts_of_what_is_no_picture_are_refused() -> None:
    with raises_code("no-pictures-to-shift", EmbodrlError):
        shifted_inputs({"state": torch.zeros(4, 8)}, 4, generator())
