"""Parts of `elastic_storm.py`.

| module | |
|---|---|
| hooks | what runs inside the replicas: steps of a given length, and faults at chosen places |
| watch | a run whose ended replicas are started again |
| faults | the kinds of faults, how they are drawn and made |
| analysis | numbers from the journal and the actions, targets, the page |
"""
