"""Attaches the engine to Megatron and detaches it; the only package that imports Megatron.

| module | content |
|---|---|
| attach, seams/ | reversible patches of Megatron, and probes of the symbols that they use |
| arguments, checking, agreement, settings | flags: added, checked, equal on all replicas |
| devices | choice of CUDA or CPU; GPUs that torch cannot use |
| training, stops | hooks of Megatron's training loop, and its early end |
| model/ | one replica's model, optimizers and schedule as the engine's host |
| overlap, groups | landing units before Megatron gathers them; process groups |
| data, assigned_data | samples of a replica: its fixed share, or blocks of the ledger |
| observe, metrics, timers | Megatron's logs, and what EDiT adds to them |
| checkpoint/ | checkpoints of replicas, built on Megatron's |
| cpu/ | Megatron without CUDA |
"""
