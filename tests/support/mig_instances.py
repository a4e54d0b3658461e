"""GPU instances of divided GPUs, as NVML reports them: what a reading by nvidia-smi lacks.

Sizes and profiles are those of the captures that tests/golden/nvidia-smi/README.md names."""

from __future__ import annotations

from exporters.gpu.readings import MigReading

H100 = (
    MigReading(
        uuid="GPU-3f0c2a1e-0000-4000-8000-000000000003",
        gpu_instance=2,
        mig_uuid="MIG-00000000-0000-5000-8000-000000000003",
        profile="3g.40gb",
        memory_used_bytes=11629756416.0,
        memory_free_bytes=30783045632.0,
        memory_total_bytes=42412802048.0,
        memory_reserved_bytes=0.0,
    ),
    MigReading(
        uuid="GPU-3f0c2a1e-0000-4000-8000-000000000003",
        gpu_instance=3,
        mig_uuid="MIG-00000001-0000-5000-8000-000000000003",
        profile="2g.20gb",
        memory_used_bytes=17825792.0,
        memory_free_bytes=21054357504.0,
        memory_total_bytes=21072183296.0,
        memory_reserved_bytes=0.0,
    ),
    MigReading(
        uuid="GPU-3f0c2a1e-0000-4000-8000-000000000003",
        gpu_instance=9,
        mig_uuid="MIG-00000002-0000-5000-8000-000000000003",
        profile="1g.10gb",
        memory_used_bytes=9437184.0,
        memory_free_bytes=10459545600.0,
        memory_total_bytes=10468982784.0,
        memory_reserved_bytes=0.0,
    ),
    MigReading(
        uuid="GPU-3f0c2a1e-0000-4000-8000-000000000003",
        gpu_instance=10,
        mig_uuid="MIG-00000003-0000-5000-8000-000000000003",
        profile="1g.10gb",
        memory_used_bytes=9437184.0,
        memory_free_bytes=10459545600.0,
        memory_total_bytes=10468982784.0,
        memory_reserved_bytes=0.0,
    ),
)
H200 = (
    MigReading(
        uuid="GPU-3f0c2a1e-0000-4000-8000-000000000002",
        gpu_instance=2,
        mig_uuid="MIG-00000000-0000-5000-8000-000000000002",
        profile="3g.71gb",
        memory_used_bytes=41966108672.0,
        memory_free_bytes=32927383552.0,
        memory_total_bytes=74893492224.0,
        memory_reserved_bytes=0.0,
    ),
    MigReading(
        uuid="GPU-3f0c2a1e-0000-4000-8000-000000000002",
        gpu_instance=3,
        mig_uuid="MIG-00000002-0000-5000-8000-000000000002",
        profile="2g.35gb",
        memory_used_bytes=17825792.0,
        memory_free_bytes=34879832064.0,
        memory_total_bytes=34896609280.0,
        memory_reserved_bytes=0.0,
    ),
    MigReading(
        uuid="GPU-3f0c2a1e-0000-4000-8000-000000000002",
        gpu_instance=9,
        mig_uuid="MIG-00000003-0000-5000-8000-000000000002",
        profile="1g.18gb",
        memory_used_bytes=9437184.0,
        memory_free_bytes=17171480576.0,
        memory_total_bytes=17179869184.0,
        memory_reserved_bytes=0.0,
    ),
    MigReading(
        uuid="GPU-3f0c2a1e-0000-4000-8000-000000000002",
        gpu_instance=10,
        mig_uuid="MIG-00000004-0000-5000-8000-000000000002",
        profile="1g.18gb",
        absent={
            "memory_used_bytes": "permission",
            "memory_free_bytes": "not_available",
            "memory_total_bytes": "not_available",
            "memory_reserved_bytes": "not_available",
        },
    ),
)
INSTANCES = {"h100-mig": H100, "h200-mig": H200}
