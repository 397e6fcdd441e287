"""`python -m services.scheduler.simulate`: runs a trace under one policy, or all of them, and prints the figures."""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from random import Random

from services.scheduler.simulate.policies import POLICIES, Policy
from services.scheduler.simulate.report import (
    SHORT_PROMPT_TOKENS,
    Report,
    first_token_times,
    of_modest_tenants,
    percentile,
    sum_up,
    with_short_prompts,
)
from services.scheduler.simulate.simulation import Served, Simulation
from services.scheduler.simulate.step_times import PROFILES, Profile
from services.scheduler.simulate.trace import TRACES, Trace, pace

_HEADINGS = (
    "policy",
    "tokens/s",
    "TTFT p50",
    "p99",
    "short p99",
    "modest p99",
    "ITL p99",
    "Jain",
    "hit rate",
    "preemptions",
    "wall s",
)
_ROW = "{:<17}{:>9}{:>10}{:>8}{:>11}{:>12}{:>9}{:>7}{:>10}{:>13}{:>8}"
_LEGEND = f"""
TTFT: from arrival to first token, ITL: between two tokens, both in simulated milliseconds. short: prompts of up to
{SHORT_PROMPT_TOKENS} tokens. modest: all tenants but the one with most requests. Jain: 1 if all have their fair shares.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    options = _parser().parse_args(arguments)
    profile = PROFILES[options.profile]
    trace = _make_trace(options, profile)
    names = list(POLICIES) if options.policy == "all" else [options.policy]
    if not options.json:
        print(
            f"{len(trace)} requests ({options.trace}) on {options.executors} executors: {profile.description}.\n"
            f"Asked for {options.load:.0%} of what they could do without a prefix cache; seed {options.seed}.\n"
        )
        print(_ROW.format(*_HEADINGS))
    reports = {}
    for name in names:
        reports[name], served = run(trace, POLICIES[name], profile, options.executors, options.seed)
        if not options.json:
            print(_row(name, reports[name], served), flush=True)
    if options.json and options.policy == "all":
        print(json.dumps([{"policy": name, **report.as_json()} for name, report in reports.items()]))
    elif options.json:
        print(json.dumps(reports[options.policy].as_json()))
    else:
        print(_LEGEND, *(f"{name}: {POLICIES[name].description}" for name in names), sep="\n")


def run(trace: Trace, policy: Policy, profile: Profile, num_executors: int, seed: int) -> tuple[Report, list[Served]]:
    """The figures of one run, and how each request fared."""
    began = time.perf_counter()
    simulation = Simulation(trace, policy, profile, num_executors=num_executors, seed=seed)
    served = simulation.run()
    wall_s = time.perf_counter() - began
    return sum_up(served, num_preemptions=simulation.num_preemptions, wall_s=wall_s), served


def _make_trace(options: argparse.Namespace, profile: Profile) -> Trace:
    trace = TRACES[options.trace](Random(options.seed), options.requests)
    num_rows = profile.capacity.max_slots
    work_s = sum(
        profile.step_times.request_seconds(len(request.prompt), len(request.output), num_rows) for request in trace
    )
    return pace(trace, work_s / len(trace) / options.executors / options.load)


def _row(name: str, report: Report, served: list[Served]) -> str:
    return _ROW.format(
        name,
        f"{report.throughput_tok_s:.0f}",
        f"{report.ttft_p50_ms:.0f}",
        f"{report.ttft_p99_ms:.0f}",
        _p99_ms(with_short_prompts(served)),
        _p99_ms(of_modest_tenants(served)),
        f"{report.itl_p99_ms:.0f}",
        f"{report.jain:.3f}",
        f"{report.hit_rate:.1%}",
        report.preemptions,
        f"{report.wall_s:.1f}",
    )


def _p99_ms(served: list[Served]) -> str:
    return f"{percentile(first_token_times(served), 0.99) * 1e3:.0f}" if served else "–"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal simulate",
        description="Run the real scheduler against simulated executors, to see what its policies buy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--requests", type=_at_least_1, default=10_000, metavar="N", help="how many to serve")
    parser.add_argument("--executors", type=_at_least_1, default=64, metavar="M", help="how many serve them")
    parser.add_argument("--policy", choices=[*POLICIES, "all"], default="shoal", help="how to schedule")
    parser.add_argument("--trace", choices=list(TRACES), default="mixed", help="how requests arrive")
    parser.add_argument("--profile", choices=list(PROFILES), default="cpu", help="how fast executors are")
    parser.add_argument(
        "--load", type=_positive, default=0.9, help="work that arrives, of what executors do without a prefix cache"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same figures")
    parser.add_argument("--json", action="store_true", help="one JSON object, or for `all` a list of them")
    return parser


def _at_least_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError("must be a positive number")
    return number


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends like any other program
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
