"""`nep calibrate`: measures this machine and writes the profile that the planner computes with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nep.planning.cost.hardware import HardwareProfile
from nep.report.command_line import parse_options
from nep.report.plan_figures import bytes_text
from nep.report.readers.files import write_text
from nep.report.readers.hardware_file import read_hardware
from nep.report.readers.model_file import read_model
from nep.report.terminal import print_text

EXAMPLES = "\n".join(
    (
        "examples:",
        "",
        "  # This machine's processor, with the sizes of the small preset.",
        "  nep calibrate --out cpu.json --tokens 512 --seq-len 128",
        "",
        "  # A GPU; what one device cannot measure (links to others, power) comes from the published profile.",
        "  nep calibrate --out h100.json --model mixtral-8x7b --device cuda --dtype bfloat16 --base H100",
        "",
        "  # Plan with it.",
        "  nep plan --model debug --gpus-per-node 4 --hardware cpu.json --dtype float32",
    )
)


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Measure products, attention, memory and exchanges on this machine, at the sizes of a model.

    Takes seconds to minutes; nothing else should run meanwhile.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The profile to write, for nep plan --hardware."""
    model: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")] = "debug"
    """Preset or config.json whose sizes are measured."""
    tokens: int = 2048
    """Of one micro-batch, a multiple of seq-len."""
    seq_len: int = 512
    """Tokens of a sequence."""
    device: str = "cpu"
    """A torch device."""
    dtype: Literal["bfloat16", "float32", "float64"] = "float32"
    """Of parameters and activations."""
    moe_backend: str = "loop"
    """Kernels of the experts."""
    repeats: int = 20
    """Timed runs of each measurement; the fastest counts."""
    base: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE", help_behavior_hint="")] = None
    """Profile (name or file) for what cannot be measured here; without one it is unlimited or unknown."""
    json: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Print the profile as one object in the last line."""


def main(arguments: Sequence[str], *, measure: Callable[..., HardwareProfile] | None = None) -> int:
    """Runs `nep calibrate`.

    Args:
        arguments: those after `nep calibrate`.
        measure: what measures; None for `nep.train.calibrate.calibrate`.

    Returns:
        0.

    Raises:
        ValueError: bad input, in one sentence.
    """
    options = parse_options(CalibrateOptions, prog="nep calibrate", arguments=arguments, epilog=EXAMPLES)
    if not options.out.parent.is_dir():
        raise ValueError(f"--out ({options.out}): the folder {options.out.parent} does not exist; create it first")
    shape = read_model(options.model).shape
    base = read_hardware(options.base) if options.base is not None else None
    import torch  # only now: a mistake in the options must not cost the seconds that torch takes

    try:
        torch.zeros(1, device=options.device)
    except (AssertionError, RuntimeError) as error:  # torch says the first where it was built without CUDA
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device ({options.device}) cannot be used here: {reason}; --device cpu always can") from error
    if measure is None:
        from nep.train.calibrate import calibrate

        measure = calibrate
    begin = time.perf_counter()
    profile = measure(
        shape,
        tokens=options.tokens,
        seq_len=options.seq_len,
        device=options.device,
        dtype=getattr(torch, options.dtype),
        backend=options.moe_backend,
        repeats=options.repeats,
        base=base,
    )
    write_text(options.out, profile.to_json() + "\n")
    print_text(profile_text(profile))
    print_text(f"\nwrote {options.out} after {time.perf_counter() - begin:.0f} s")
    if options.json:
        print(json.dumps(json.loads(profile.to_json()), separators=(",", ":")))
    return 0


def profile_text(profile: HardwareProfile) -> str:
    """A profile's numbers, one a line, and below them where they are from."""
    rows = [
        *(
            (f"products of {8 * size} bits", f"{speed / 1e12:.4g} TFLOP/s")
            for size, speed in sorted(profile.flops_per_s.items())
        ),
        ("share in large products", f"{profile.gemm_efficiency:.2f}"),
        ("share in experts", f"{profile.expert_efficiency:.2f}"),
        ("share in attention", f"{profile.attention_efficiency:.2f}"),
        ("starting an operation", f"{profile.launch_s * 1e6:.3g} us"),
        ("memory", _per_second(profile.memory_bytes_per_s)),
        ("scale-up link", _per_second(profile.scale_up.bytes_per_s)),
        ("network", _per_second(profile.network.bytes_per_s)),
    ]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    by_source: dict[str, list[str]] = {}
    for key, source in profile.sources.items():
        by_source.setdefault(source, []).append(key)
    return "\n".join(
        [
            profile.name,
            *(f"{name:<{name_width}}  {value:>{value_width}}" for name, value in rows),
            *(f"{', '.join(keys)}: {source}" for source, keys in by_source.items()),
        ]
    )


def _per_second(rate: float | None) -> str:
    return "not limited" if rate is None else f"{bytes_text(rate)}/s"
