"""The shell around the core: carries out its orders, with deadlines, and reports how they ended.

`controller` is the one the engine drives; `storage_worker` keeps a store's threads behind
`storage_port`. What is decided is decided in the core, what is counted is counted in the ledger.
"""
