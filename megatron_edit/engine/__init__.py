"""The engine: phases, rounds and syncs of one rank. Knows its host only by a protocol.

`engine.EditEngine` is the only face: nobody outside imports anything below it but plain data.
"""
