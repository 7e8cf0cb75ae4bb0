"""The modules of `megatron-edit compare`: planning, running and evaluating trainings.

| module | contents |
|---|---|
| flags, entries, plan | the runs, as immutable data |
| finished | stored results, by the hash of their configuration |
| follow, runs | starting, following and aborting trainings |
| console_log, traffic, readings | the results of a training, as numbers |
| statistics, analysis | statistics over several runs |
| pictures, page | the report |
"""
