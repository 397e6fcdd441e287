"""The angles of rotary position embedding for every position, in the ways that models stretch them.

Owns the frequencies. The rotation itself is `kernels.rotary`. Frequencies and angles are float32, in the operations and
the order of Hugging Face's models, since that is what the weights were trained or checked with.
"""

import math

import torch
from torch import Tensor

from services.executor.kernels.rotary import RotaryTable
from shared.models.config import RopeConfig


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int) -> RotaryTable:
    """Cosines and sines of positions 0 … num_positions - 1, times the attention factor."""
    frequencies = inverse_frequencies(rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    factor = attention_factor(rope)
    return RotaryTable(angles.cos() * factor, angles.sin() * factor)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each of the head's pairs, [head_dim / 2] float32."""
    inverse = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    match rope.kind:
        case "default":
            return inverse
        case "linear":
            return inverse / rope.factor
        case "llama3":
            return _llama3(rope, inverse)
        case "yarn":
            return _yarn(rope, head_dim)
    raise ValueError(f"unknown kind of rotary embedding: {rope.kind}")


def attention_factor(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by, so that a stretched attention stays as sharp: YaRN's alone is not 1."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Long waves are stretched, short ones kept, and those in between mixed. Source: Llama 3.1's reference code."""
    wavelength = 2 * math.pi / inverse
    mix = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - mix) * inverse / rope.factor + mix * inverse
    is_long = wavelength > rope.original_max_position / rope.low_freq_factor
    is_short = wavelength < rope.original_max_position / rope.high_freq_factor
    return torch.where(is_long, inverse / rope.factor, torch.where(is_short, inverse, mixed))


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """Fast pairs keep their frequency, slow ones are stretched, with a ramp between them.

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", ICLR 2024.
    """

    def pair_that_turns(num_turns: float) -> float:
        """Which pair turns so often within the original context."""
        return (head_dim * math.log(rope.original_max_position / (num_turns * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    high: float = min(math.ceil(pair_that_turns(rope.beta_slow)), head_dim - 1)
    if high == low:
        high += 0.001  # the ramp would divide by zero
    powers = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
