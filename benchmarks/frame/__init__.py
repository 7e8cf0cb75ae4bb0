"""The framework of all benchmarks.

| module | |
|---|---|
| gpt | the model that is trained, its flags, the measured iterations, links and their names |
| pretrain_torchft | a training script: torchft's DiLoCo across replicas of stock Megatron |
| launch | starts, follows and ends trainings on this machine or in the hosts of a lab |
| study | command line and runner: repeats, stored runs, `--resume`, the JSON file of results |
| readings | reads the console and the event files of a training |
| page | spreads over repeats, Markdown tables, pictures |

Studies repeat all runs alternately, so that all runs of a repeat share the state of the machine.

A benchmark is a script next to this package and a package of its parts. Parts import this package,
and never each other.
"""
