"""Reversible patches of Megatron, and probes of the symbols that they use."""
