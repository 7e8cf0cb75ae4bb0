"""Several runs on one page: `megatron-edit report RUN RUN ...`.

| module | contents |
|---|---|
| names | short names of runs |
| progress | tokens, seconds, losses and bytes of a run, as curves |
| results | the table of results |
| settings | settings that differ |
| pictures | losses, speed and bytes |
| page | the page, and the summary for the console |

Runs are read by `tools.monitor`; losses are smoothed and plotted as by `tools.compare`.
"""
