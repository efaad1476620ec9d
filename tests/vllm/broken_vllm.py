"""An extension with which vLLM fails in its third batch."""

from embodrl.hybrid_engines.rollout.vllm.decoder import VllmDecoder

start = VllmDecoder._start


def start_broken(self, *args):
    llm = start(self, *args)
    generate, calls = llm.generate, 0

    def generate_twice(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("no page left")
        return generate(*args, **kwargs)

    llm.generate = generate_twice
    return llm


VllmDecoder._start = start_broken
