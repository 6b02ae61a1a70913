"""What a rank needs before a model can be built: the device, Megatron-Core, process groups."""
