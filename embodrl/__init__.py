"""embodrl: reinforcement learning for vision-language-action models, from a laptop CPU to a cluster."""

__version__ = "0.1.0"
