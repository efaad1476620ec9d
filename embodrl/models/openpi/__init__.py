"""Shared by openpi's families, and partly SmolVLA: files, statistics, tokenizers, prompts and PaliGemma."""
