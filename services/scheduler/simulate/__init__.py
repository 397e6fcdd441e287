"""The real core against executors that only take time: what its policies buy, without a model.

`trace` (who asks for what, when) and `step_times` (how long a step takes) are the inputs; `executor` follows plans,
`simulation` moves time, `policies` puts the core together, `report` sums up. No clock decides anything: the same seed
gives the same figures. Not imported by the service.
"""
