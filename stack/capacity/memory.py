"""Memory beside the KV cache: weights, activations, CUDA, NCCL, CUDA graphs.

vLLM measures these at start-up (v1/worker/gpu_worker.py, determine_available_memory) and gives the rest of
gpu_memory_utilization to the KV cache. Here the weights are computed; the others are figures measured elsewhere, and
say so."""

from __future__ import annotations

from dataclasses import dataclass

from stack.capacity.gpus import GIB, MIB, GpuModel, whole
from stack.capacity.kv import BadServing, Serving, most_layers
from stack.capacity.model import BadModel, ModelShape

PLANNER = "llm-d-planner 0.3.3, vllm_memory_constants.json: vLLM 0.19 on H100-80GB, 49 runs of 28 models"
GRAPHS = (
    "vLLM's own lines 'Estimated CUDA graph memory' in public logs: 0.3 to 0.8 GiB up to 40 layers, 2.75 GiB at 80;"
    " about 20 MiB a layer"
)
# GiB at the peak of a step, by architecture; what is not listed has the figure of its kind.
ACTIVATIONS = {
    "LlamaForCausalLM": 1.89,
    "Qwen2ForCausalLM": 2.25,
    "Qwen3ForCausalLM": 2.21,
    "Mistral3ForConditionalGeneration": 2.10,
    "PixtralForConditionalGeneration": 2.10,
    "DeepseekV2ForCausalLM": 1.93,
    "GraniteForCausalLM": 0.85,
    "LlavaNextForConditionalGeneration": 0.79,
    "MixtralForCausalLM": 1.21,
    "Phi3ForCausalLM": 1.52,
    "Qwen2MoeForCausalLM": 2.47,
    "Qwen3MoeForCausalLM": 2.68,
    "Gemma2ForCausalLM": 3.65,
    "Gemma3ForCausalLM": 3.94,
    "GemmaForCausalLM": 3.63,
}
DENSE, EXPERTS, IMAGES = 2.00, 2.50, 2.00
ALONE, STAGES, TENSOR = 0.27, 0.07, 2.10  # GiB outside PyTorch: one GPU, pipeline stages, a tensor-parallel group
GRAPH_PER_LAYER = 20 * MIB


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One part of a GPU's memory that is not KV cache, and where the figure comes from."""

    name: str
    bytes: float
    source: str
    estimated: bool


def parts(shape: ModelShape, serving: Serving, gpu: GpuModel) -> tuple[MemoryPart, ...]:
    """Everything per GPU that is not KV cache; raises BadModel where the weights are not known, BadServing for slices
    joined."""
    if gpu.of is not None and serving.tensor_parallel * serving.pipeline_parallel > 1:
        raise BadServing(
            f"{gpu.name} is a slice, and one engine cannot join slices; take tensor_parallel 1 or whole {gpu.of} GPUs"
        )
    activations = ACTIVATIONS.get(shape.architecture, EXPERTS if shape.moe else IMAGES if shape.multimodal else DENSE)
    outside = TENSOR if serving.tensor_parallel > 1 else STAGES if serving.pipeline_parallel > 1 else ALONE
    counted = shape.weights_from.startswith("counted")
    return (
        MemoryPart("weights", weight_bytes(shape, serving), shape.weights_from, counted),
        MemoryPart("activations", activations * GIB, PLANNER, True),
        MemoryPart("outside PyTorch (CUDA, NCCL)", outside * GIB, PLANNER, True),
        MemoryPart("CUDA graphs", float(GRAPH_PER_LAYER * most_layers(shape, serving)), GRAPHS, True),
    )


def kv_budget(shape: ModelShape, serving: Serving, gpu: GpuModel, parts: tuple[MemoryPart, ...]) -> float:
    """Bytes per GPU that are left for the KV cache; negative when the model does not fit.

    utilization x what CUDA reports - parts. Since 0.21 vLLM takes its estimate of the CUDA graphs off as well."""
    return serving.gpu_memory_utilization * (gpu.usable_bytes or gpu.memory_bytes) - sum(part.bytes for part in parts)


def weight_bytes(shape: ModelShape, serving: Serving) -> float:
    """Bytes of weights on the fullest GPU.

    Divided by tensor_parallel, but for what every GPU of the group holds whole: routers, the down-projections of latent
    attention, and KV heads beyond the last one. With pipeline stages the fullest has the most layers; the embeddings,
    or the output head, are added to it."""
    if shape.weight_bytes is None or not shape.parameters:
        raise BadModel(
            f"{shape.name}: what its weights take is not known ({'; '.join(shape.notes)}); give the folder of the model"
            " with its weights"
        )
    split, share = serving.tensor_parallel, most_layers(shape, serving) / len(shape.layers)
    divided = shape.weight_bytes
    if serving.pipeline_parallel > 1:
        table = shape.vocabulary * shape.hidden * 2.0
        divided = (shape.weight_bytes - table * (1 if shape.tied else 2)) * share + table
    return divided / split + _copied(shape, split) * share * shape.weight_bytes / shape.parameters


def default_batched_tokens(gpu: GpuModel) -> int:
    """max_num_batched_tokens of vLLM's API server on this GPU when nobody sets it.

    Source: vLLM 0.32 engine/arg_utils.py, get_batch_defaults. Memory and name are NVML's of the device by its number
    (platforms/cuda.py), and under that number NVML has the whole GPU, not the slice in use."""
    asked = whole(gpu)
    memory = asked.usable_bytes or asked.memory_bytes
    if memory >= 160 * GIB:
        return 16384
    return 8192 if memory >= 70 * GIB and "A100" not in asked.name else 2048


def _copied(shape: ModelShape, split: int) -> float:
    """Parameters that one GPU of a group holds beyond its fair share: what all hold whole, and a KV head that others
    hold too."""
    heads = sum(
        shape.hidden * layer.kv_heads * (layer.head_k + layer.head_v) * (1 / layer.kv_heads - 1 / split)
        for layer in shape.layers
        if layer.kind in ("full", "window", "chunked") and split > layer.kv_heads
    )
    return shape.replicated * (1 - 1 / split) + heads
