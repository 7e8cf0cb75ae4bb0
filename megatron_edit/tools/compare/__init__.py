"""The inside of `megatron-edit compare`: what is run, how it is followed, and what is made of it.

| module | what it holds |
|---|---|
| flags, entries, plan | what is run, as immutable data |
| finished | results that are kept, by the hash of their configuration |
| follow, runs | trainings: started, followed, given up |
| console_log, traffic, readings | what a training left behind, as numbers |
| statistics, analysis | numbers of several runs together |
| pictures, page | what people read |
"""
