"""Event files of a run, read while they grow: `megatron-edit report` and `megatron-edit watch`.

`run` reads a folder of event files; its records are read by `observe.line_files` and
`observe.records`, next to their writers. `findings` and `summary` have what the page and the
terminal show; `page` and `watch` show it.
"""
