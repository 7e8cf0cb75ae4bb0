"""Changing Megatron and back: patches that can be undone, probes of what they stand on."""
