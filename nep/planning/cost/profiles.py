"""Published numbers of accelerators, each with its source.

Speeds of products are what a data sheet promises times what was measured; bandwidths of links are measured
where somebody published a measurement, and per direction. What nobody published (time to launch a kernel) is
left at zero: calibrate. NVIDIA's own pages were read as quoted in the tables that are named with them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nep.planning.cost.hardware import HardwareProfile, Link

_BOOK = "github.com/stas00/ml-engineering (August 2026)"
_MATMUL = f"largest measured bf16 product over the data sheet's speed, {_BOOK}, compute/accelerator, MAMF table"
_TILE = (
    "usual tile of 128 x 256 results (docs.nvidia.com/deeplearning/performance/dl-performance-matrix-"
    f"multiplication; {_BOOK}, training/performance)"
)
_STREAMING = "share of the data sheet's bandwidth that large copies achieve, systems/a100_80g.json of calculon"
_LATENCY = "systems/a100_80g.json of github.com/calculon-ai/calculon"
_POWER = f"{_BOOK}, compute/accelerator, power table"
_NVLINK_4 = (
    f"ring all-reduce on 8 H200, 365.6 of 450 GB/s a direction (nvidia.com/data-center/nvlink); {_BOOK}, network"
)
_NVLINK_5 = (
    "DeepEP V2 dispatch over 8 GPUs, 726 of 900 GB/s a direction (github.com/deepseek-ai/DeepEP); a ring "
    f"all-reduce 682 ({_BOOK}, network)"
)
_NDR = "DeepEP V1 dispatch over 16 H800, 43 of 50 GB/s of a 400 Gb/s ConnectX-7 (DeepEP docs/legacy.md)"


def _nvidia(sources: Mapping[str, str], **numbers: Any) -> HardwareProfile:
    common = {
        "expert_efficiency": "as other products; how far grouped products stay behind is not published",
        "tile_rows": _TILE,
        "tile_columns": _TILE,
        "memory_efficiency": _STREAMING,
        "scale_up.latency_s": _LATENCY,
        "network.latency_s": _LATENCY,
        "gemm_efficiency": _MATMUL,
        "launch_s": "not published; hidden while kernels are long",
    }
    return HardwareProfile(
        tile_rows=128,
        tile_columns=256,
        memory_efficiency=0.9,
        expert_efficiency=numbers["gemm_efficiency"],
        sources=common | dict(sources),
        **numbers,
    )


_A100 = _nvidia(
    {
        "flops_per_s": "nvidia.com/data-center/a100: 312 TFLOP/s bf16, 156 TF32, 19.5 float64, dense",
        "attention_efficiency": "FlashAttention-2 reaches 50-73 % of the peak (arXiv 2307.08691); the middle",
        "processors": f"108 streaming multiprocessors, {_BOOK}, compute/accelerator",
        "memory_bytes_per_s": "nvidia.com/data-center/a100: 2,039 GB/s",
        "memory_bytes": "nvidia.com/data-center/a100: 80 GB",
        "scale_up": f"all-reduce 235 of 300 GB/s a direction, {_BOOK}, network",
        "network": "200 Gb/s HDR InfiniBand per GPU (DGX A100), at the share that 400 Gb/s achieves: " + _NDR,
        "default_power_w": f"nvidia.com/data-center/a100: 400 W; {_POWER}",
        "max_power_w": "as default_power_w",
    },
    name="a100-80gb-sxm",
    flops_per_s={2: 312e12, 4: 156e12, 8: 19.5e12},
    gemm_efficiency=0.869,
    attention_efficiency=0.61,
    processors=108,
    memory_bytes_per_s=2.039e12,
    scale_up=Link(bytes_per_s=235e9, latency_s=10e-6),
    network=Link(bytes_per_s=21.5e9, latency_s=20e-6),
    memory_bytes=80 * 10**9,
    default_power_w=400.0,
    max_power_w=400.0,
)

_HOPPER = {
    "flops_per_s": "nvidia.com/data-center/h100: 989.4 TFLOP/s bf16, 494.7 TF32, 66.9 float64, dense",
    "attention_efficiency": (
        "447 TFLOP/s in a training step on H200 with FlashAttention-3, 8 K tokens, counted with 3 times the "
        f"forward where we count 3.5 ({_BOOK}, insights/when-to-upgrade-gpus)"
    ),
    "processors": f"132 streaming multiprocessors, {_BOOK}, compute/accelerator",
    "scale_up": _NVLINK_4,
    "network": _NDR,
    "max_power_w": "as default_power_w",
}

_H100 = _nvidia(
    _HOPPER
    | {
        "memory_bytes_per_s": "nvidia.com/data-center/h100: 3.35 TB/s",
        "memory_bytes": "nvidia.com/data-center/h100: 80 GB",
        "default_power_w": f"nvidia.com/data-center/h100: up to 700 W; {_POWER}",
    },
    name="h100-sxm",
    flops_per_s={2: 989.4e12, 4: 494.7e12, 8: 66.9e12},
    gemm_efficiency=0.803,
    attention_efficiency=0.527,
    processors=132,
    memory_bytes_per_s=3.35e12,
    scale_up=Link(bytes_per_s=365.6e9, latency_s=10e-6),
    network=Link(bytes_per_s=43e9, latency_s=20e-6),
    memory_bytes=80 * 10**9,
    default_power_w=700.0,
    max_power_w=700.0,
)

_H200 = _nvidia(
    _HOPPER
    | {
        "memory_bytes_per_s": "nvidia.com/data-center/h200: 4.8 TB/s",
        "memory_bytes": "nvidia.com/data-center/h200: 141 GB",
        "default_power_w": f"nvidia.com/data-center/h200: up to 700 W; {_POWER}",
        "gemm_efficiency": _MATMUL + " (H100; there: 'H200 is the same')",
    },
    name="h200-sxm",
    flops_per_s={2: 989.4e12, 4: 494.7e12, 8: 66.9e12},
    gemm_efficiency=0.803,
    attention_efficiency=0.527,
    processors=132,
    memory_bytes_per_s=4.8e12,
    scale_up=Link(bytes_per_s=365.6e9, latency_s=10e-6),
    network=Link(bytes_per_s=43e9, latency_s=20e-6),
    memory_bytes=141 * 10**9,
    default_power_w=700.0,
    max_power_w=700.0,
)

_BLACKWELL = {
    "attention_efficiency": (
        "834 TFLOP/s in a training step on B200 with FlashAttention-4, 8 K tokens, counted with 3 times the "
        f"forward where we count 3.5 ({_BOOK}, insights/when-to-upgrade-gpus)"
    ),
    "memory_bytes_per_s": f"8 TB/s, {_BOOK}, compute/accelerator (NVIDIA DGX B200 and GB200 NVL72 data sheets)",
    "scale_up": _NVLINK_5,
    "network": _NDR,
}

_B200 = _nvidia(
    _BLACKWELL
    | {
        "flops_per_s": f"NVIDIA DGX B200 data sheet: 2,250 TFLOP/s bf16, 1,125 TF32, 40 float64, dense; {_BOOK}",
        "processors": "148 streaming multiprocessors (Chips and Cheese, Nvidia's B200, December 2025)",
        "memory_bytes": f"180 GB, docs.nvidia.com HGX AI Factory components, in {_BOOK}, compute/accelerator",
        "default_power_w": "700 W, the default set point of DGX B200 "
        f"(docs.nvidia.com/dgx/dgxb200-user-guide/power-capping.html, in {_BOOK}, compute/accelerator)",
        "max_power_w": "1,000 W, same page",
    },
    name="b200-sxm",
    flops_per_s={2: 2250e12, 4: 1125e12, 8: 40e12},
    gemm_efficiency=0.776,
    attention_efficiency=0.432,
    processors=148,
    memory_bytes_per_s=8e12,
    scale_up=Link(bytes_per_s=726e9, latency_s=10e-6),
    network=Link(bytes_per_s=43e9, latency_s=20e-6),
    memory_bytes=180 * 10**9,
    default_power_w=700.0,
    max_power_w=1000.0,
)

_GB200 = _nvidia(
    _BLACKWELL
    | {
        "flops_per_s": "nvidia.com/data-center/gb200-nvl72, a 72nd of the rack: 2,500 TFLOP/s bf16, 1,250 TF32, "
        f"45 float64, dense; {_BOOK}, compute/accelerator (float64: glennklockwood.com/garden/processors/B200)",
        "processors": f"152 streaming multiprocessors, as the wider of two parts, {_BOOK}, training/performance",
        "memory_bytes": f"186 GB, nvidia.com multi-instance-gpu, in {_BOOK}, compute/accelerator",
        "network": "one 400 Gb/s ConnectX-7 per GPU (docs.nvidia.com/dgx/dgxgb200-user-guide/networking); " + _NDR,
        "scale_up_slots": "nvidia.com/data-center/gb200-nvl72: 72 GPUs in one NVLink domain",
        "default_power_w": f"1,200 W per GPU (docs.nvidia.com mission control, power FAQ); {_POWER}",
        "max_power_w": "as default_power_w",
    },
    name="gb200-nvl72",
    flops_per_s={2: 2500e12, 4: 1250e12, 8: 45e12},
    gemm_efficiency=0.729,
    attention_efficiency=0.432,
    processors=152,
    memory_bytes_per_s=8e12,
    scale_up=Link(bytes_per_s=726e9, latency_s=10e-6),
    network=Link(bytes_per_s=43e9, latency_s=20e-6),
    scale_up_slots=72,
    memory_bytes=186 * 10**9,
    default_power_w=1200.0,
    max_power_w=1200.0,
)

PROFILES: Mapping[str, HardwareProfile] = MappingProxyType(
    {profile.name: profile for profile in (_A100, _H100, _H200, _B200, _GB200)}
)
"""Published profiles by name."""


def published_profile(name: str) -> HardwareProfile:
    """The published profile of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in PROFILES:
        raise ValueError(
            f"hardware ({name!r}) is not a published profile; choose one of {', '.join(PROFILES)} or give a "
            "file that `nep calibrate` wrote"
        )
    return PROFILES[name]
