"""Bytes between device and host: pools and their layouts, the list copy, and transfers over them.

`port` is what a transfer must do; `cpu` and `virtual` are transfers. Nothing here knows the cache.
"""
