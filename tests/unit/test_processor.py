"""What a processor computes with, from what Linux reports and the limits that torch and oneDNN heed."""

from __future__ import annotations

import pytest

from embodrl.processor import Processor, parse

SAPPHIRE = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: avx2 avx512f avx512_bf16 amx_bf16\n"
SKYLAKE = SAPPHIRE.replace(" avx512_bf16 amx_bf16", "")
MILAN = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: avx avx2 vaes\n\nprocessor\t: 1\nflags\t\t: avx512_bf16\n"
GRAVITON = "processor\t: 0\nFeatures\t: asimd sve bf16\n"


@pytest.mark.parametrize(
    ("cpuinfo", "limits", "instructions", "has_bf16"),
    [
        (SAPPHIRE, {}, "AVX-512 with bf16", True),
        (SAPPHIRE, {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX2", False),
        (SAPPHIRE, {"ATEN_CPU_CAPABILITY": "avx2"}, "AVX2", False),
        (SAPPHIRE, {"ATEN_CPU_CAPABILITY": "avx512"}, "AVX-512 with bf16", True),
        (SAPPHIRE, {"ONEDNN_MAX_CPU_ISA": "avx512_core"}, "AVX-512", False),
        (SAPPHIRE, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "AVX-512 with bf16", True),
        (SKYLAKE, {}, "AVX-512", False),
        (MILAN, {}, "AVX2", False),
        (GRAVITON, {}, "SVE with bf16", True),
    ],
)
def test_instructions(cpuinfo: str, limits: dict[str, str], instructions: str, has_bf16: bool) -> None:
    found = parse(cpuinfo, limits)
    assert (found.instructions, found.has_bf16) == (instructions, has_bf16)


def test_the_name_is_of_the_first_processor() -> None:
    assert parse(MILAN, {}) == Processor("AMD EPYC", "AVX2", False)
    assert parse("", {}).has_bf16 is False
