"""Table of GPUs and MIG profiles with usable memory; parsing of --gpu.

A slice's name is rounded up: a 1g.18gb of an H200 has 16.0 GiB. Where a source prints two figures (drivers differ) the
smaller one stands. Bandwidth and bf16 throughput without sparsity are the vendors' data sheets; a slice has its share
of memory slices and of multiprocessors.
One engine cannot join slices: tensor parallelism needs whole GPUs."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One GPU, or one slice of it."""

    name: str
    memory_bytes: int  # as NVML and nvidia-smi report it
    bandwidth: float  # bytes per second
    flops: float  # dense bf16 operations per second
    profile: str | None = None
    of: str | None = None  # the whole GPU that this is a slice of
    instances: int = 1  # that fit on one GPU
    source: str = ""
    usable_bytes: int = 0  # as CUDA reports it to a process: what gpu_memory_utilization is a share of


SMI = "nvidia-smi: {} MiB; PyTorch's out-of-memory messages: {} GiB"
AMD = "AMD's data sheet: 192 GB; rocm-smi and PyTorch: 191.98 GiB"


def _whole(name: str, mib: int, usable_gib: float, gb_per_s: float, tflops: float, source: str = SMI) -> GpuModel:
    return GpuModel(
        name,
        mib * MIB,
        gb_per_s * 1e9,
        tflops * 1e12,
        source=source.format(f"{mib:,}", usable_gib),
        usable_bytes=int(usable_gib * GIB),
    )


WHOLE = (
    _whole("A100-40GB", 40960, 39.25, 1555, 312),
    _whole("A100-80GB", 81920, 79.14, 2039, 312),
    _whole("H100-80GB", 81559, 79.1, 3350, 989),
    _whole("H100-NVL", 95830, 93.02, 3900, 835),
    _whole("H200", 143771, 139.72, 4800, 989),
    _whole("B200", 183359, 178.35, 7700, 2250),
    _whole("L4", 23034, 22.03, 300, 121),
    _whole("L40S", 46068, 44.34, 864, 362),
    _whole("A10", 23028, 21.98, 600, 125),
    _whole("RTX-4090", 24564, 23.52, 1008, 165),
    _whole("RTX-5090", 32607, 31.36, 1792, 209),
    _whole("MI300X", 196592, 191.98, 5300, 1307, AMD),
)

# profile: instances, GiB, memory slices of 8, share of the multiprocessors. Printed by `nvidia-smi mig -lgip`;
# instances: NVIDIA's MIG guide.
Slices = dict[str, tuple[int, float, int, float]]
ATLEAST = "; 3g, 4g and 7g: not printed there, at least twice the slice of half their size"
PROFILES: dict[str, tuple[str, Slices]] = {
    "A100-40GB": (
        "nvidia-smi mig -lgip, NVIDIA MIG User Guide",
        {
            "1g.5gb": (7, 4.75, 1, 14 / 108),
            "1g.10gb": (4, 9.62, 2, 14 / 108),
            "2g.10gb": (3, 9.62, 2, 28 / 108),
            "3g.20gb": (2, 19.5, 4, 42 / 108),
            "4g.20gb": (1, 19.5, 4, 56 / 108),
            "7g.40gb": (1, 39.25, 8, 98 / 108),
        },
    ),
    "A100-80GB": (
        "nvidia-smi mig -lgip, the smaller of two drivers' figures",
        {
            "1g.10gb": (7, 9.5, 1, 14 / 108),
            "1g.20gb": (4, 19.5, 2, 14 / 108),
            "2g.20gb": (3, 19.5, 2, 28 / 108),
            "3g.40gb": (2, 39.25, 4, 42 / 108),
            "4g.40gb": (1, 39.25, 4, 56 / 108),
            "7g.80gb": (1, 79.0, 8, 98 / 108),
        },
    ),
    "H100-80GB": (
        "nvidia-smi mig -lgip, https://jbarrow.ai/field_notes/nvidia-mig/",
        {
            "1g.10gb": (7, 9.75, 1, 16 / 132),
            "1g.20gb": (4, 19.62, 2, 26 / 132),
            "2g.20gb": (3, 19.62, 2, 32 / 132),
            "3g.40gb": (2, 39.5, 4, 60 / 132),
            "4g.40gb": (1, 39.5, 4, 64 / 132),
            "7g.80gb": (1, 79.1, 8, 1.0),
        },
    ),
    "H100-NVL": (
        (
            "nvidia-smi mig -lgip, https://github.com/NVIDIA/mig-parted/pull/101 and"
            " https://github.com/NVIDIA/gpu-operator/pull/900"
        ),
        {
            "1g.12gb": (7, 10.75, 1, 16 / 132),
            "1g.24gb": (4, 21.62, 2, 26 / 132),
            "2g.24gb": (3, 21.62, 2, 32 / 132),
            "3g.47gb": (2, 46.38, 4, 60 / 132),
            "4g.47gb": (1, 46.38, 4, 64 / 132),
            "7g.94gb": (1, 92.76, 8, 1.0),
        },
    ),
    "H200": (
        "nvidia-smi mig -lgip, https://github.com/NVIDIA/mig-parted/issues/120",
        {
            "1g.18gb": (7, 16.0, 1, 16 / 132),
            "1g.35gb": (4, 32.25, 2, 26 / 132),
            "2g.35gb": (3, 32.25, 2, 32 / 132),
            "3g.71gb": (2, 69.5, 4, 60 / 132),
            "4g.71gb": (1, 69.5, 4, 64 / 132),
            "7g.141gb": (1, 139.0, 8, 1.0),
        },
    ),
    "B200": (
        "nvidia-smi mig -lgip, https://github.com/NVIDIA/mig-parted/pull/187" + ATLEAST,
        {
            "1g.23gb": (7, 20.5, 1, 18 / 148),
            "1g.45gb": (4, 44.25, 2, 30 / 148),
            "2g.45gb": (3, 44.25, 2, 36 / 148),
            "3g.90gb": (2, 88.5, 4, 54 / 148),
            "4g.90gb": (1, 88.5, 4, 72 / 148),
            "7g.180gb": (1, 177.0, 8, 1.0),
        },
    ),
}


def slices(whole: GpuModel) -> tuple[GpuModel, ...]:
    """The MIG slices of a whole GPU, smallest first; none where the GPU has no MIG."""
    source, profiles = PROFILES.get(whole.name, ("", {}))
    return tuple(
        GpuModel(
            name=f"{whole.name}/{profile}",
            memory_bytes=int(gib * GIB),
            bandwidth=whole.bandwidth * eighths / 8,
            flops=whole.flops * share,
            profile=profile,
            of=whole.name,
            instances=instances,
            source=source,
            usable_bytes=int(gib * GIB),
        )
        for profile, (instances, gib, eighths, share) in profiles.items()
    )


GPUS: tuple[GpuModel, ...] = tuple(gpu for whole in WHOLE for gpu in (whole, *slices(whole)))


def whole(gpu: GpuModel) -> GpuModel:
    """The GPU that a slice is cut from; a whole GPU is its own."""
    return next(each for each in WHOLE if each.name == gpu.of) if gpu.of else gpu


USUAL = {
    "a100": "A100-80GB",
    "h100": "H100-80GB",
    "h100nvl94": "H100-NVL",
    "h10094": "H100-NVL",
    "4090": "RTX-4090",
    "5090": "RTX-5090",
}


# Share of a GPU's nominal memory that CUDA reports to a process: the least in WHOLE (A10: 21.98 of 24 GiB)
USABLE_SHARE = 0.915


def _unnamed(gib: float) -> GpuModel:
    """Return a GPU of which only the memory is known. Bandwidth and throughput are 0: no bound follows from them."""
    source = f"{USABLE_SHARE:.1%} of {gib:g} GiB, as of the GPU that reports least of its label's size"
    return GpuModel(f"{gib:g}GB", int(gib * GIB), 0.0, 0.0, source=source, usable_bytes=int(gib * USABLE_SHARE * GIB))


def gpu_named(name: str) -> GpuModel:
    """Return the GPU of this name: "H200", "h100-80gb", "H200/3g.71gb", "H200 3g.71gb", "1g.18gb@H200", or of this
    memory: "24GB".

    Raises ValueError with the nearest names and all known ones."""
    if size := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*gi?b\s*", name, re.IGNORECASE):
        return _unnamed(float(size[1]))
    if "@" not in name and "/" not in name:
        # as some write it: H100 1g.10gb
        name = re.sub(r"[\s:]+(?=(mig[- ])?\d+g\.\d+gb\s*$)", "/", name.strip(), flags=re.IGNORECASE)
    profile, at, whole_name = name.partition("@")
    if not at:
        whole_name, _, profile = name.partition("/")
    wanted = _plain(whole_name)
    named = {whole.name: whole for whole in WHOLE}
    known = {_plain(long): found for long, found in named.items()} | {
        short: named[long] for short, long in USUAL.items()
    }
    found = known.get(wanted)
    if found is None:
        near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.4)
        raise ValueError(
            f"the GPU {whole_name!r} is not known;"
            f" {_or([known[key].name for key in near]) + ' ' if near else ''}known are"
            f" {', '.join(each.name for each in WHOLE)}, and a memory size such as 24GB"
        )
    if not profile.strip():
        return found
    for piece in slices(found):
        if piece.profile == profile.strip().lower().removeprefix("mig-").removeprefix("mig "):
            return piece
    names = [piece.name for piece in slices(found)]
    raise ValueError(
        f"{found.name} has no slice {profile.strip()!r}; " + (_or(names) if names else "it cannot be cut into slices")
    )


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|amd|instinct|sxm\d?|pcie|hbm\w*|gb|[^a-z0-9]", "", name.lower())


def _or(names: list[str]) -> str:
    return "did you mean " + " or ".join(dict.fromkeys(names)) + "?"
