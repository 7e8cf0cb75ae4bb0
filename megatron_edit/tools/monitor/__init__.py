"""The inside of `megatron-edit report` and `megatron-edit watch`: a run, read while it grows.

| module | what it holds |
|---|---|
| facts | what `run.json` says |
| series | numbers over a training of any length, in bounded memory |
| syncs, replicas, spikes | what `sync.jsonl` and a `replica-<r>.jsonl` say |
| segments, run | the whole folder, of all runs of a training |
| findings | what deserves attention |
| summary, texts | what page and terminal both say |
| charts, page | the page |
| frame | the terminal |

Files and lines are read by `observe.line_files` and `observe.records`, beside their writers.
"""
