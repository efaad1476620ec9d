"""Weights from where they train to where they act. See docs/weight_sync.md."""
