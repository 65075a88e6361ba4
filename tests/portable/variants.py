"""The other machines: a name, and the environment variables that make this one behave like it."""

import shutil
from pathlib import Path

FORCED = {
    "native": {},
    "default": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
    },
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_CBWR": "AVX512",
    },
    "threads": {"GOOSE_THREADS": "2"},
    "gpu": {"CUDA_VISIBLE_DEVICES": "0"},
    **{f"jitter:{n}": {"GOOSE_JITTER": str(n)} for n in range(1, 11)},
}


def missing(variant: str) -> str | None:
    "Why a variant cannot run on this machine."
    if variant == "gpu":
        return None if shutil.which("nvidia-smi") else "there is no GPU here"
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    needs = {"avx512": "avx512f", "avx2": "avx2"}.get(variant)
    return f"this processor has no {variant}" if needs and f" {needs} " not in flags else None
