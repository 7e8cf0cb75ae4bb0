"""The inside of `megatron-edit report` and `megatron-edit watch`: a run, read while it grows.

| module | what it holds |
|---|---|
| values | numbers of a file, checked |
| facts | what `run.json` says |
| lines | a JSON Lines file, followed |
| series | numbers over a training of any length, in bounded memory |
| syncs | what `sync.jsonl` says |
| replicas | what a `replica-<r>.jsonl` says |
| run | the whole folder |
| findings | what deserves attention |
| strokes, curves, heat, charts, page | the page |
| frame | the terminal |
"""
