"""Elastic replicas: a hub that decides which replicas take part, and who talks to it.

| module | what it has |
|---|---|
| journal | the hub's record of decisions: append-only lines, each durable before it is sent |
| messages | the messages between hub and replicas, and their checks |
| channel | how messages are framed and authenticated |
| hub_state | what the hub knows, and how a journal leads to it |
| inputs | what the hub's decisions take and give |
| machine | the hub's decisions: a pure state machine, without time, sockets or files |
| replica | a replica's side of the protocol: its counterpart |
| liveness | which replicas are silent for too long |
| deadlines | what the hub does when the time for something is over |
| store | small values through the hub, with which groups are formed |
| server | the hub process |
| agent | a replica's connection to the hub |
"""
