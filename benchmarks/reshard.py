"""How many bytes ``dcp.load`` fetches for those that it needs, when ranks load what others have saved.

``python -m benchmarks.reshard`` starts an in-memory S3 server in a process of its own. Real gloo ranks save a small
Llama once in each source layout, by dcp_s3; then the ranks of each target layout load it, in every round through each
backend by turns: dcp_s3, dcp_s3 without sharing of reads between the ranks, torch's fsspec backend, s3torchconnector.
Bytes and requests are what the server counted during the load, by rank (each signs in a name of its own). What was
loaded is compared bit by bit, outside of the measured time. Status 1 if dcp_s3 fetches more than the targets allow.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.cases import Target, reason_to_skip
from benchmarks.report import machine
from benchmarks.reshard_cases import CASES, Layout, Spec, llama_spec, needed_bytes, unique_bytes
from benchmarks.reshard_report import Load, Results, count, find_misses, save_chart, show
from benchmarks.reshard_worker import BACKENDS, WARM_UP, Cost, access_key, work
from benchmarks.save_load import RESULTS, serve_embedded
from benchmarks.units import MIB, parse_size
from tests.ranks import RankFailed, RanksTimedOut, run_ranks

_BUCKET, _REGION, _PREFIX = "bench", "us-east-1", "reshard"
_TIMEOUT_SECONDS = 600
#: The metadata of many small tensors would be a large part of what a quick run fetches.
_LAYERS, _QUICK_LAYERS = 20, 3


def main() -> None:
    """Run the benchmark as the command line says; print a table, write JSON and a chart."""
    options = _parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 200)
    skipped = {name: reason for name in options.backends if (reason := reason_to_skip(BACKENDS[name]))}
    for name, reason in skipped.items():
        console.print(f"[yellow]{name} skipped: {reason}")
    backends = [name for name in options.backends if name not in skipped]
    spec = llama_spec(options.size, layers=_QUICK_LAYERS if options.quick else _LAYERS)
    described = {name: value for name, value in vars(options).items() if name != "out"}
    results = Results(machine(), described | {"skipped": skipped})
    measure(spec, options.cases, backends, options.rounds, results, console.print)
    show(results, console)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(asdict(results), indent=1, default=str) + "\n")
    console.print(f"samples: {options.out}")
    if results.loads:
        save_chart(results, options.out.with_suffix(".png"))
        console.print(f"chart: {options.out.with_suffix('.png')}")
    misses = find_misses(results.loads)
    for miss in misses:
        console.print(f"[red]missed: {miss}")
    if misses or results.failures:
        sys.exit(1)


def measure(
    spec: Spec,
    cases: Sequence[str],
    backends: Sequence[str],
    rounds: int,
    results: Results,
    say: Callable[[str], None],
) -> None:
    """Save in each source layout of ``cases``; load each of them through each backend ``rounds`` times."""
    sources = {CASES[name].source.name: CASES[name].source for name in cases}
    size = sum(tensor.nbytes for tensor in spec.values())
    with serve_embedded(_BUCKET, _REGION, size * len(sources)) as (endpoint_url, environment):
        target = Target(_BUCKET, _PREFIX, endpoint_url, _REGION, threads=4)
        unsaved = {_key(layout): layout for layout in sources.values()}
        warm_up = {WARM_UP: Layout(WARM_UP, (1,), (None,), (None,), plain=True)}
        for number, ranks, only_save in schedule(cases, rounds):
            saves = {key: layout for key, layout in unsaved.items() if layout.ranks == ranks}
            unsaved = {key: layout for key, layout in unsaved.items() if key not in saves}
            here = [] if only_save else [name for name in cases if CASES[name].target.ranks == ranks]
            loads = [(name, backend) for name in here for backend in backends]
            requests = [(_key(CASES[name].source), CASES[name].target, backend) for name, backend in loads]
            arguments = spec, warm_up | saves, requests, target
            say(f"[bold]{f'round {number}, ' if loads else 'saving, '}{ranks} ranks")
            warm_up = {}
            try:
                costs = run_ranks(ranks, work, *arguments, timeout=_TIMEOUT_SECONDS, env=environment)
            except (RankFailed, RanksTimedOut) as error:
                say(f"[red]{ranks} ranks failed:[/]\n{str(error)[-2000:]}")
                results.failures.setdefault(f"{ranks} ranks", []).append(str(error)[-2000:])
                continue
            for (name, backend), by_rank in zip(loads, zip(*costs, strict=True), strict=True):
                _note(name, backend, number, by_rank, spec, results, say)


def schedule(cases: Sequence[str], rounds: int) -> list[tuple[int, int, bool]]:
    """Groups of ranks to start, in order: round (from 1), number of ranks, whether they save only. Pure.

    Ranks save what is to be saved by as many when they are there for the first time; those with the most loads need
    not be started for that alone.
    """
    loads = Counter(CASES[name].target.ranks for name in cases)
    savers = sorted({CASES[name].source.ranks for name in cases}, key=lambda ranks: (loads[ranks], ranks))
    if loads[savers[-1]]:
        last = savers.pop()
        loads[last] += sum(loads.values())
    order = [ranks for ranks, _ in loads.most_common()]
    return [(1, ranks, True) for ranks in savers] + [
        (number, ranks, False) for number in range(1, rounds + 1) for ranks in order
    ]


def _key(layout: Layout) -> str:
    """The checkpoint's name."""
    return layout.name.replace(" ", "-")


def _note(
    name: str,
    backend: str,
    number: int,
    costs: Sequence[Cost],
    spec: Spec,
    results: Results,
    say: Callable[[str], None],
) -> None:
    """Add one load, of which each rank has a cost, to the results."""
    counters = costs[0].counters
    failures = [cost.failure for cost in costs if cost.failure]
    if failures or counters is None:
        say(f"  [red]{name:11} {backend:17}failed:[/]\n{failures[0]}")
        results.failures.setdefault(f"{name} {backend}", []).append(failures[0])
        return
    layout = CASES[name].target
    load = Load(
        case=name,
        backend=backend,
        round=number,
        needed_bytes=needed_bytes(spec, layout),
        unique_bytes=unique_bytes(spec, layout),
        seconds=max(cost.seconds for cost in costs),
        cpu_seconds=sum(cost.cpu_seconds for cost in costs),
        **count(counters, [access_key(rank) for rank in range(layout.ranks)]),
    )
    results.loads.append(load)
    say(f"  {name:11} {backend:17}{load}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reshard",
        description="Count the bytes that dcp.load fetches, for those that it needs, when sharding changes.",
    )
    parser.add_argument(
        "--cases", type=_names(CASES), default=list(CASES), metavar="NAME,...", help=f"default: {','.join(CASES)}"
    )
    parser.add_argument(
        "--backends",
        type=_names(BACKENDS),
        default=list(BACKENDS),
        metavar="NAME,...",
        help=f"default: {','.join(BACKENDS)}",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything: to see that it runs")
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument("--size", type=parse_size, help="of the state; default: 512MiB, or 64MiB with --quick")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "reshard.json", help="samples; the chart is beside them; %(default)s"
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.size = options.size or (64 * MIB if options.quick else 512 * MIB)
    return options


def _names(known: dict[str, object]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    main()
