"""How long a step takes: a straight line through measured steps, and the executors that it is known for.

    seconds = base + per_row * rows + per_prompt_token * (tokens - rows) + per_context_token * context

`rows` are the choices in the step, `tokens` what they compute together, `context` the tokens whose keys and values they
read: for each row, all up to the last that it computes. A row of one token is an output going on, so tokens beyond one
a row are prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from shared.messages import ExecutorCapacity, StepPlan


class MeasuredStep(NamedTuple):
    """One kind of step and how long it took."""

    num_rows: int
    num_prompt_tokens: int
    """Tokens beyond one a row."""
    num_context_tokens: int
    milliseconds: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The line's coefficients, in seconds."""

    base_s: float
    row_s: float
    prompt_token_s: float
    context_token_s: float

    def seconds(self, plan: StepPlan) -> float:
        """How long a plan takes."""
        num_rows, num_tokens = len(plan.slots), sum(plan.counts)
        num_context_tokens = sum(plan.starts) + num_tokens
        return (
            self.base_s
            + self.row_s * num_rows
            + self.prompt_token_s * (num_tokens - num_rows)
            + self.context_token_s * num_context_tokens
        )

    def request_seconds(self, num_prompt_tokens: int, num_output_tokens: int, num_rows: int) -> float:
        """About how much of an executor's time a request takes, if each of its steps is shared by `num_rows`."""
        mean_context = num_prompt_tokens + num_output_tokens / 2
        output_token_s = self.base_s / num_rows + self.row_s + self.context_token_s * mean_context
        return self.prompt_token_s * num_prompt_tokens + output_token_s * num_output_tokens


def fit(steps: Sequence[MeasuredStep]) -> StepTimes:
    """The line whose relative errors over `steps` have the smallest sum of squares.

    Raises ValueError if the steps are too few, or too much alike, to tell the four coefficients apart.
    """
    rows = [
        [x * 1e3 / step.milliseconds for x in (1, step.num_rows, step.num_prompt_tokens, step.num_context_tokens)]
        for step in steps
    ]
    normal = [[sum(row[i] * row[j] for row in rows) for j in range(4)] for i in range(4)]
    return StepTimes(*_solve(normal, [sum(row[i] for row in rows) for i in range(4)]))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a system of linear equations, by Gauss's elimination with pivots."""
    size = len(right)
    system = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    scales = [max(map(abs, row)) for row in matrix]
    for column in range(size):
        pivot = max(range(column, size), key=lambda at: abs(system[at][column]))
        if abs(system[pivot][column]) <= 1e-12 * scales[column]:
            raise ValueError("these steps do not tell what rows, prompt tokens and context take apart")
        system[column], system[pivot] = system[pivot], system[column]
        for below in range(column + 1, size):
            factor = system[below][column] / system[column][column]
            system[below] = [x - factor * y for x, y in zip(system[below], system[column], strict=True)]
    solution = [0.0] * size
    for at in reversed(range(size)):
        known = sum(system[at][k] * solution[k] for k in range(at + 1, size))
        solution[at] = (system[at][size] - known) / system[at][at]
    return solution


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of executor."""

    name: str
    description: str
    capacity: ExecutorCapacity
    step_times: StepTimes


MODEL: Final = "model"
"""What all simulated executors serve."""

CPU_STEPS: Final = tuple(
    MeasuredStep(*step)
    for step in (
        (1, 0, 65, 27.1),
        (1, 0, 1025, 26.9),
        (8, 0, 520, 45.2),
        (8, 0, 8200, 55.2),
        (32, 0, 2080, 77.6),
        (32, 0, 16416, 92.8),
        (32, 0, 32800, 107.6),
        (64, 0, 4160, 116.4),
        (64, 0, 32832, 153.0),
        (64, 0, 65600, 182.8),
        (1, 63, 64, 79.3),
        (1, 255, 256, 233.5),
        (1, 511, 512, 489.0),
        (1, 255, 768, 304.1),
        (9, 63, 4168, 97.3),
        (9, 255, 4360, 255.8),
        (33, 127, 16800, 218.4),
        (33, 255, 16672, 291.5),
    )
)
"""`ModelRunner.run` of SmolLM2-135M in float32 on 2 cores of a 2.6 GHz Xeon (Sapphire Rapids); the fastest of 7."""

CPU: Final = Profile(
    "cpu",
    "SmolLM2-135M in float32 on 2 cores, as measured",
    ExecutorCapacity(MODEL, num_blocks=4096, block_size=16, max_slots=64, max_model_len=8192, max_step_tokens=512),
    fit(CPU_STEPS),
)

GPU: Final = Profile(
    "gpu",
    "8 billion parameters in 16 bits on a card with 80 GB at 3.35 TB/s, as computed from these numbers",
    ExecutorCapacity(MODEL, num_blocks=24_000, block_size=16, max_slots=128, max_model_len=8192, max_step_tokens=2048),
    StepTimes(
        base_s=6e-3,  # 16 GB of weights take 4.8 ms to read; the rest is launching
        row_s=20e-6,  # 16 GFLOP at 800 TFLOP/s, read and sampled
        prompt_token_s=40e-6,  # 16 GFLOP at 400 TFLOP/s, half of what the card promises
        context_token_s=0.05e-6,  # 128 KiB of keys and values at 80 % of the bandwidth
    ),
)
"""An assumption, not a measurement."""

PROFILES: Final = {profile.name: profile for profile in (CPU, GPU)}
