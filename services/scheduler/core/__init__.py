"""The scheduler core: a synchronous, deterministic state machine without clock, randomness or I/O.

`block_pool` ← `prefix_cache` ← `block_manager` ← `scheduler` (one executor) ← `fleet` (several); `policy` decides,
`request` remembers. Calls go down, values come up. The same calls always give the same plans.
"""
