"""Elastic replicas: a hub that decides which replicas take part, and who talks to it.

| module | what it has |
|---|---|
| journal | the hub's record of decisions: append-only lines, each durable before it is sent |
| messages | the messages between hub and replicas, and their checks |
| channel | how messages are framed and authenticated |
| hub_state | what the hub knows, how a journal leads to it, and what its decisions take and give |
| machine | the hub's decisions: a pure state machine, without time, sockets or files |
| replica | a replica's side of the protocol: its counterpart |
| deadlines | which replicas are silent, and what the hub does when a time is over |
| store | small values through the hub, with which groups are formed |
| server | the hub process |
| agent | a replica's connection to the hub |
"""
