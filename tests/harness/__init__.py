"""Tests with several ranks: fork them from a preloaded server, and train tiny GPTs in them.

`run_ranks` calls a function in every rank of a world. `train` runs a Megatron pretraining script
in every rank and parses its console output. `tiny_gpt` builds the command line. All of it also
works without pytest; a pytest session closes the server at its end (see ``conftest.py``).
"""

from tests.harness.launch import RankResult, run_ranks, shut_down
from tests.harness.training import Flags, TrainResult, tiny_gpt, train

__all__ = ["Flags", "RankResult", "TrainResult", "run_ranks", "shut_down", "tiny_gpt", "train"]
