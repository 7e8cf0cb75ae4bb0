"""The modules of `megatron-edit compare`: planning, running and evaluating trainings.

| module | contents |
|---|---|
| flags, entries, plan | the runs, as immutable data, and marks of finished ones |
| runs | starting, following and aborting trainings |
| traffic, readings | the results of a training, as numbers |
| page | the report, with statistics over several runs |
"""
