"""Chaos: a mesh of real processes in which something dies, freezes or leaves while many streams run.

`workload` says what is asked for, the two clients ask and come back for what they miss, `history` judges what they saw
and `accounts` what was recorded of it, `beats` tells who is busy and what is left over, `faults` does the harm, `runs`
puts one run together. `test_scenarios` is the short version; `make chaos` goes on for as long as asked.
"""
