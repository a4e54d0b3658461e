"""Starts real vLLM engines one after the other in one process, and keeps what each says of its KV cache: its page, and
its start-up log.

Run by preloaded_vllm.py: `engine_sizes.py CASES FOLDER`. A case is a model's configuration and the engine's options;
its weights are random ones that vLLM makes itself, so the configuration is all there is of the model. Each engine takes
2 s of CPU."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "OMP_NUM_THREADS": "1",
}
MARK = "=== started: "


def main(cases: Path, folder: Path) -> None:
    from prometheus_client import generate_latest
    from vllm import LLM, ModelRegistry  # type: ignore[import-not-found,unused-ignore]
    from vllm.distributed import cleanup_dist_env_and_memory  # type: ignore[import-not-found,unused-ignore]

    logging.getLogger("vllm").setLevel(logging.INFO)  # preloaded_vllm.py has other scripts say nothing
    for name, case in json.loads(cases.read_text()).items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(case["config"]))
        sys.stdout.write(f"{MARK}{name}\n")
        sys.stdout.flush()
        (architecture,) = case["config"]["architectures"]
        # A class that is registered by hand is looked at here and now; vLLM starts a process to look at one of its own,
        # 15 s of CPU each.
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
        engine = LLM(
            str(folder / name),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,
            **case["options"],
        )
        (folder / f"{name}.prom").write_bytes(generate_latest())
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
