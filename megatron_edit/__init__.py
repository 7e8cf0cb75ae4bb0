"""EDiT and its relatives for Megatron-LM. Importing this package changes nothing."""

__version__ = "0.2.0"
