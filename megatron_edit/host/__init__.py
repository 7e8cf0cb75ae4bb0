"""The only package that imports Megatron: it attaches the engine and can detach it again.

| module | what it holds |
|---|---|
| attach, seams/ | what is wrapped, how it is undone, and what we use of Megatron: is it there? |
| arguments, checking, agreement, settings | flags: beside Megatron's, checked, alike everywhere |
| devices | CUDA or CPU, and GPUs that cannot be used |
| training, stops | Megatron's training loop and its ends |
| model/ | one replica's model, optimizers and schedule as the engine's host |
| overlap, groups | landing units before Megatron gathers them; Megatron's process groups |
| data, assigned_data | samples: each replica's share, and those that the ledger deals |
| observe, metrics, timers | what Megatron logs, and what EDiT adds to it |
| checkpoint/ | checkpoints of replicas, through Megatron's own |
| cpu/ | Megatron without CUDA |
"""
