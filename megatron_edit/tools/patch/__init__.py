"""One activating line in the training scripts of a clone of Megatron-LM (megatron-edit patch)."""
