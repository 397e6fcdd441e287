"""The operations on tensors, one a file: a host function that checks its arguments, and its truth, the naive twin.

Owns formulas and memory layouts. Knows nothing of models, batches or weights by name. Callers use the host function;
how it computes may change, what it computes may not: a row's result is a function of that row alone, to the last bit.
"""
