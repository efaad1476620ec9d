"""Observations to inputs of pi0-FAST."""

from __future__ import annotations

from embodrl.models.openpi.processing import PiProcessor


class FastProcessor(PiProcessor):
    """Prepares images and prompts like pi0.5 with the state; the model writes ``Action:`` instead of reading it."""

    section = "model.pi0_fast"
    prompt_end = "\n"
