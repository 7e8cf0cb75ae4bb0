"""Event files of a run, read while they grow: `megatron-edit report` and `megatron-edit watch`.

`files` reads a folder of event files; lines and records are read by `observe.line_files` and
`observe.records`, next to their writers. `run`, `replicas`, `syncs` and `membership` compute the
state of the training from all records, anew with each read. `findings` and `summary` have what the
page and the terminal show; `page` and `watch` show it.
"""
