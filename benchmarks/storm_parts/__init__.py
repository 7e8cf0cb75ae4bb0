"""Parts of `elastic_storm.py`: which faults there are, how they are made, and what is measured.

| module | what it has |
|---|---|
| tape | the faults of a storm, drawn from a seed |
| hooks | what runs inside the replicas: steps of a given length, and faults at chosen places |
| control | what the hub costs without faults, measured in the replicas |
| watch | a run under a supervisor that starts replicas again |
| faults | makes one fault, and waits until the run is whole again |
| history | readers of the files of a storm |
| analysis | numbers from these files |
| report | the page, and the summary |
"""
