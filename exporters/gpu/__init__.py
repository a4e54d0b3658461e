"""GPU readings through NVML or nvidia-smi, and the series made of them."""
