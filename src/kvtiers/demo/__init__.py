"""The demonstration: a real model, a real workload over HTTP, three tiers, every answer checked.

    act      what happens                                             what it must show
    fill     eight visitors talk; the device tier overflows           hits on device
    return   all come back; their pages were evicted to host          host hits >= reusable / 2
    restart  SIGTERM, a new server on the same storage, all return    storage hits >= reusable / 2

It stands above the server and talks to it over HTTP only, as a client would. `run` conducts,
`workload` has the texts, `client` asks, `server_process` starts and stops the child, `books` reads
/metrics and /cache, `exactness` compares with the model without a cache, `checks` decides, and
`report` prints.
"""
