"""Download of a model into HF_HOME before the engine starts, which has no access to the internet.

Runs inside vLLM's image, by its Python and its huggingface_hub; not part of the vllm-watch command.
MODEL is a Hugging Face name, or a folder that is used as it is. HF_TOKEN_PATH names a file that may be empty.
"""

import importlib
import os
import sys

# Formats that vLLM does not read by default are left where they are.
UNREAD = ["original/*", "*.gguf", "*.onnx", "*.pth", "*.h5", "*.msgpack"]


def main() -> int:
    model, revision = os.environ["MODEL"], os.environ.get("MODEL_REVISION", "main")
    if os.path.isdir(model):
        sys.stderr.write(f"{model}: a folder, nothing to fetch\n")
        return 0
    try:
        hub = importlib.import_module("huggingface_hub")
        # what is there already is only checked
        folder = hub.snapshot_download(model, revision=revision, ignore_patterns=UNREAD)
    except Exception as error:
        sys.stderr.write(
            f"{model} (revision {revision}) could not be fetched: {error}\n"
            "Gated model: accept its terms on its page and set VLLM_WATCH_HF_TOKEN_FILE to a file with your token.\n"
            "No network: mount a folder with the model and set VLLM_WATCH_MODEL to its path in the container.\n"
        )
        return 1
    sys.stderr.write(f"{model}: ready in {folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
