"""Making a recording's decisions again: `python -m services.scheduler.replay FILE`, or `shoal replay FILE`.

`reading` gives the records, `player` makes the calls and compares, `summary`, `timeline` and `queues` say what is seen
on the way, `report` prints it.
"""
