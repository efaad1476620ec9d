"""Observations to inputs of pi0-FAST."""

from __future__ import annotations

from embodrl.models.openpi.processing import PiProcessor


class FastProcessor(PiProcessor):
    """Images and prompts as those of pi0.5 with the state; ``Action:`` is written by the model, not read."""

    section = "model.pi0_fast"
    prompt_end = "\n"
