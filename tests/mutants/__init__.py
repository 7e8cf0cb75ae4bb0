"""Mutants: bugs inserted into a copy of the package, each to be caught by the test named for it.

`catalog.MUTANTS` lists them; ``python -m tests.mutants.run`` applies each and runs its test.
"""
