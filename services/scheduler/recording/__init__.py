"""Recording every call on the fleet, so that the same decisions can be made again elsewhere: see `replay`.

`calls` and `answers` are what is recorded, `records` what a recording consists of, `file` its bytes, `recording` the
one that is being made, `recorded_fleet` the fleet that it is made of.
"""
