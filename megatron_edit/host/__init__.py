"""The only package that imports Megatron: it attaches the engine and can detach it again.

| module | what it holds |
|---|---|
| attach, patching, probes | what is wrapped, how it is undone, and whether this Megatron has it |
| arguments, checking, agreement, settings | flags: beside Megatron's, checked, alike everywhere |
| training, loop, stops, ends | Megatron's training loop and its ends |
| model, planning, naming | one replica's model as the engine's host, and its units |
| optimizer, moments, rates | Megatron's optimizers and schedule, as the engine sees them |
| overlap | landing units before Megatron gathers them |
| groups, routers | Megatron's process groups; biases of MoE routers |
| data, dealing | samples: each replica's share, and those that the ledger deals |
| observe, metrics, timers, describe | what Megatron logs, and what EDiT adds to it |
| checkpoint/ | checkpoints of replicas, through Megatron's own |
| cpu/ | Megatron without CUDA |
"""
