"""What the integer decoder works on: a model's weights by address, a step's inputs, and the memory between phases."""

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from services.executor.kernels.jit import Floats, Ints, Longs

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
    norm: Floats
    """[hidden]."""
    norm_facts: Floats
    """1 / hidden, and eps."""
    head_norm_facts: Floats
    """1 / head_dim, and eps."""
    scale: Floats
    """[1]: what scores are multiplied by."""
    cos: Floats
    """[positions, head_dim / 2]."""
    sin: Floats
    """[positions, head_dim / 2]."""


class Inputs(NamedTuple):
    """A step's batch, in arrays large enough for any."""

    counts: Longs
    """Tokens, pieces of attention for each kv head, rows of logits."""
    token_ids: Longs
    positions: Longs
    slot_mapping: Longs
    members: Ints
    """[members, 4]: sequence, first query, number of queries, position of the first query."""
    pieces: Ints
    """[pieces, 3]: first member, the one after the last, how many tokens all of them begin with."""
    records: Longs
    """[sequences, records]: where each 16 tokens of a sequence begin, for the first kv head, from the beginning of a
    layer's cache."""
    logits_rows: Longs


class Work(NamedTuple):
    """What lies between the phases, a row a token."""

    residual: Floats
    delta: Floats
    """What the last product adds to the residual."""
    qkv: Floats
    attended: Floats
    ints: npt.NDArray[np.int8]
    steps: Floats
    middle_ints: npt.NDArray[np.int8]
    middle_steps: Floats
    logits: Floats
    scratch: npt.NDArray[np.uint8]
    """[threads, bytes]."""
    spent: Longs
    """[len(PHASES) + 1]: cycles that phases of each kind have taken, waiting included; then when the last one ended."""
