"""Event files of a run, read while they grow: `megatron-edit report` and `megatron-edit watch`.

| module | contents |
|---|---|
| facts | the contents of `run.json` |
| series | time series of any length, in bounded memory |
| syncs, replicas, spikes | the contents of `sync.jsonl` and of a `replica-<r>.jsonl` |
| membership | who took part in an elastic run: by sync, and from its hub's journal |
| segments, run | the folder, with all runs of a training |
| findings | errors, warnings and notes about the run |
| summary | texts that the page and the terminal share |
| charts, membership_chart, page | the HTML page |
| frame | the terminal view |

Files and lines are read by `observe.line_files` and `observe.records`, next to their writers.
"""
