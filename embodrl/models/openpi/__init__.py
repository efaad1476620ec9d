"""What the families of openpi share, and SmolVLA in part: files, statistics, tokenizers, prompts and PaliGemma."""
