"""Megatron models from Hugging Face configs, and their weights to and from safetensors.

`config`, `vocabulary` and `tensors` are free of Megatron; everything else may be imported on ranks
only, after `megatron_backend.runtime.distributed.prepare`.
"""
