"""The engine: plans, states and syncs of one rank. Knows its host only by a protocol.

| module | what it holds |
|---|---|
| engine | what the host calls: start, warm-up, switch, rounds, end |
| host, groups, settings, report | what an engine is given, and whom it tells |
| units, selection, state | what is planned once, and the outer state: immutable data and tensors |
| pace, paces, meeting | when replicas meet (by count or clock), and the records they exchange |
| rounds, syncs | from a meeting to a sync that begins; what begins lands at its time |
| decisions | what a sync decides, from the gathered table alone |
| sync, flight, traffic | one sync, one unit on its way, all syncs under way |
| lanes, streams | copies between host and device, and the stream that a sync computes on |
| warmup, equal, soundness, buffers | averaged gradients, equal and broken replicas, router biases |
| norms, digest, drift, accounting, losses | what is measured, compared and counted |
| standing, pending, resume, completion | what a checkpoint is told, and how runs go on from it |
| patience, blame | how long others are waited for, and errors that say where training stood |
"""
