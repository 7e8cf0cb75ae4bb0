"""What all benchmarks stand on.

| module | |
|---|---|
| gpt | the model that is trained, its flags, which iterations count, links and their names |
| against | the package of an earlier commit beside that of this checkout |
| launch | trainings on this machine or in the hosts of a lab: started, followed, ended |
| study | command line and runner: turns, what was measured and going on from it, small JSON file |
| readings | what a training leaves behind: the console, event files |
| page | spreads of repeats, Markdown tables, pictures |

Studies measure in turns, so that all runs of a turn meet the same machine. `convergence` does not:
its losses are the same on a slow machine, and its questions share runs, known by their hash.

A benchmark is a script beside this package and a package of its parts; parts import this frame and
never each other.
"""
