"""Checkpoints: a publish protocol (free of Megatron) and what goes into them (`torch_dist`)."""
