"""EDiT and related local-training strategies for Megatron-LM. Importing it has no side effects."""

__version__ = "0.2.0"
