"""Validation: what a live server did under load, beside what a replay of its record says it did.

    live       a server with small tiers is calibrated, started anew, and asked by many clients
    replayed   the trace it recorded, through the same scheduler and core in virtual time
    compared   hits per tier, copies, losses, time to first token by tier of hit

It stands above the demo, whose texts and child process it uses, and above the planner, which it
holds against the server. `run` conducts, `workload` is what clients ask, `live` plays it,
`settings` are the tiers of both sides, `counts` reads the books of both by the same exporter,
`compare` judges, and `report` prints.
"""
