"""What the integer decoder works on: a model's weights by address, a step's inputs, and the memory between phases."""

from typing import Any, Final, NamedTuple

import numpy as np

from services.executor.kernels.jit import nested
from services.executor.kernels.memory import load_int64

HIDDEN: Final = 0
ATTENDED: Final = 1
MIDDLE: Final = 2
"""Which bytes a product reads: of the normalized residual, of attention, of silu(gate) · up."""

Weight = np.dtype([("address", np.int64), ("bits", np.int64), ("bias", np.int64), ("source", np.int64)])
"""A packed weight (see `grouped_linear`; `row_linear`, without bits), the address of its bias, or 0, and what it reads.
"""

Layer = np.dtype(
    [
        ("input_norm", np.int64),
        ("qkv", Weight),
        ("q_norm", np.int64),
        ("k_norm", np.int64),
        ("output", Weight),
        ("post_attention_norm", np.int64),
        ("gate_up", Weight),
        ("down", Weight),
        ("cache", np.int64),
    ]
)
"""Addresses of one layer's parts; norms that a family lacks are 0. Gate and up lie panel by panel in turn."""


PHASES = ("rows", "qkv", "cache", "attention", "output", "gate and up", "down", "head")
"""Kinds of phases: embedding, norms and bytes; products; rotary embedding and writing into the cache; and so on."""


class Shape(NamedTuple):
    """What all layers have in common."""

    hidden_groups: int
    intermediate_groups: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    spread: int
    """How many numbers of a head are spread over each other before they become bytes."""
    block_size: int
    qkv_width: int
    """Numbers that q, k and v take together, in whole panels."""
    vocab_size: int
    """In whole panels too."""
    has_tiles: bool
    """Whether products with a scale a row, and attention to a cache in int8, use tile registers."""
    tile_shapes: int
    """Address of `tiles.SHAPES`."""


class Parts(NamedTuple):
    """The model beside its layers: weights, constants and the table of angles."""

    embedding: Any
    """[1] Weight."""
    head: Any
    """[1] Weight."""
    norm: int
    """Address of [hidden] float32, as are those that follow."""
    norm_facts: int
    """1 / hidden, and eps."""
    head_norm_facts: int
    """1 / head_dim, and eps."""
    scale: int
    """[1]: what scores are multiplied by."""
    cos: int
    """[positions, head_dim / 2]."""
    sin: int
    """[positions, head_dim / 2]."""


class Inputs(NamedTuple):
    """A step's batch: addresses of 64-bit integers, with room for any."""

    counts: int
    """Tokens, pieces of attention for each kv head, rows of logits."""
    token_ids: int
    positions: int
    slot_mapping: int
    members: int
    """[members, 4]: sequence, first query, number of queries, position of the first query."""
    pieces: int
    """[pieces, 3]: first member, the one after the last, how many tokens all of them begin with."""
    records: int
    """[sequences, records_per_sequence]: where each 16 tokens of a sequence begin, for the first kv head, from the
    beginning of a layer's cache."""
    records_per_sequence: int
    logits_rows: int


@nested
def count_tokens(inputs: Inputs) -> Any:
    """Of the batch."""
    return load_int64(inputs.counts)


@nested
def count_pieces(inputs: Inputs) -> Any:
    """Of attention, for each kv head."""
    return load_int64(inputs.counts + 8)


@nested
def count_logits(inputs: Inputs) -> Any:
    """Rows of logits that are asked for."""
    return load_int64(inputs.counts + 16)


@nested
def long_at(address: int, index: int) -> Any:
    """One of several 64-bit integers."""
    return load_int64(address + 8 * index)


@nested
def piece_at(inputs: Inputs, number: int) -> tuple[int, int, int]:
    """Its first member, the one after its last, and how many tokens all of them begin with."""
    at = 3 * number
    return long_at(inputs.pieces, at), long_at(inputs.pieces, at + 1), long_at(inputs.pieces, at + 2)


@nested
def member_at(inputs: Inputs, number: int) -> tuple[int, int, int, int]:
    """Its sequence, its first query, the number of its queries, and the position of the first."""
    at, members = 4 * number, inputs.members
    return long_at(members, at), long_at(members, at + 1), long_at(members, at + 2), long_at(members, at + 3)


class Work(NamedTuple):
    """What lies between the phases: addresses of float32, or of bytes, in a row for each token.

    Addresses, because an array is many numbers, which every function that is compiled would pass on to the next.
    """

    residual: int
    delta: int
    """What the last product adds to the residual."""
    qkv: int
    attended: int
    ints: int
    steps: int
    middle_ints: int
    middle_steps: int
    logits: int
    scratch: int
    """A thread's memory after the other's."""
    scratch_bytes: int
    """Of one thread."""
    spent: int
    """[len(PHASES)] 64-bit integers: cycles that phases of each kind have taken, waiting included."""
    ended: int
    """A 64-bit integer: when the last phase ended."""
