"""Measures how long ``dcp.async_save`` stalls training with dcp_s3 and with the other ways, in one run.

``python -m benchmarks.stall`` starts an in-memory S3 server in a process of its own, then measures

- in one more process, how long ``dcp.async_save`` takes to return and until the state may be changed, next to a plain
  memcpy of as many bytes right before; cases alternate, each save is awaited before the next,
- for some of the cases, each in a process of its own (but for --quick), the time of every step of a training loop
  that saves.

No GPU, one rank, no process group. Of each save a part is loaded and compared with what the state was at the call,
outside the measured time. ``--endpoint-url`` and ``--bucket`` run the same on any other S3.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import Target, reason_to_skip
from benchmarks.report import machine
from benchmarks.save_load import RESULTS, empty, run_worker, serve
from benchmarks.stall_report import Stall, StallResults, Training, save_chart, show
from benchmarks.stall_worker import WAYS, Plan, calibrate
from benchmarks.units import GIB, MIB, parse_size

_STEP_SECONDS = 0.055
_QUICK_STEP_SECONDS = 0.01


def main() -> None:
    """Run the benchmark as the command line says, print tables, write JSON and a chart."""
    options = _parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 180)
    skipped = {name: reason for name in options.cases if (reason := reason_to_skip(WAYS[name].backend))}
    for name, reason in skipped.items():
        console.print(f"[yellow]{name} skipped: {reason}")
    names = [name for name in options.cases if name not in skipped]
    plan = _plan(quick=options.quick)
    described = {name: value for name, value in vars(options).items() if name not in ("json", "png")}
    results = StallResults(machine(), described | {"skipped": skipped, "plan": asdict(plan)})
    with serve(options) as (endpoint_url, environment):

        def new_target() -> Target:
            prefix = f"dcp-stall-{uuid.uuid4().hex[:8]}"
            return Target(options.bucket, prefix, endpoint_url, options.region, options.threads)

        console.print(f"[bold]stall of {options.rounds} rounds")
        request = {"size": options.size, "rounds": options.rounds}
        _collect(request, {name: new_target() for name in names}, environment, results, console)
        console.print(f"[bold]training, a save every {plan.every} steps")
        request = {"size": options.size, "plan": asdict(plan)}
        trained = [name for name in names if WAYS[name].trained]
        # To start a process takes longer than a quick loop.
        for together in [trained] if options.quick else [[name] for name in trained]:
            _collect(request, {name: new_target() for name in together}, environment, results, console)
    show(results, console)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(asdict(results), indent=1, default=str) + "\n")
    console.print(f"samples: {options.json}")
    if options.png and results.training:
        options.png.parent.mkdir(parents=True, exist_ok=True)
        save_chart(results, options.png)
        console.print(f"chart: {options.png}")
    if results.failures:
        sys.exit(1)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stall",
        description="Measure how long dcp.async_save stalls training with dcp_s3 and with the other ways.",
    )
    parser.add_argument(
        "--cases",
        type=_case_names,
        default=list(WAYS),
        metavar="NAME,...",
        help=f"default: {','.join(WAYS)}",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything: to see that it runs")
    parser.add_argument("--rounds", type=int, help="default: 5, or 2 with --quick")
    parser.add_argument("--size", type=parse_size, help="of the state; default: 2GiB, or 256MiB with --quick")
    parser.add_argument("--threads", type=int, default=4, help="for backends that need it; default: %(default)s")
    parser.add_argument("--endpoint-url", help="another S3 than the embedded in-memory server")
    parser.add_argument("--bucket", default="bench", help="must exist unless embedded")
    parser.add_argument("--region", default="us-east-1", help="default: %(default)s")
    parser.add_argument("--json", type=Path, default=RESULTS / "stall.json", help="default: %(default)s")
    parser.add_argument("--png", type=Path, help="also draw the steps of the training loops")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.size = options.size or (256 * MIB if options.quick else 2 * GIB)
    return options


def _case_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in WAYS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no case {', '.join(unknown)}; there are {', '.join(WAYS)}")
    return names


def _plan(*, quick: bool) -> Plan:
    """The same work for all cases."""
    multiplications = calibrate(_QUICK_STEP_SECONDS if quick else _STEP_SECONDS)
    if quick:
        return Plan(multiplications, lead_in=5, every=10, saves=2)
    return Plan(multiplications, lead_in=20, every=90, saves=3)


def _collect(
    request: dict[str, Any],
    targets: dict[str, Target],
    environment: dict[str, str],
    results: StallResults,
    console: Console,
) -> None:
    """Measure in a process of its own, and note what comes."""
    request = request | {"targets": {name: asdict(target) for name, target in targets.items()}}
    try:
        for answer in run_worker("benchmarks.stall_worker", request, environment):
            name = answer["case"]
            if "failure" in answer:
                console.print(f"[red]{name} failed:[/]\n{answer['failure'][-2000:]}")
                results.add_failure(name, answer["failure"][-2000:])
            elif "stall" in answer:
                stall = Stall(**answer["stall"])
                results.add_stall(name, stall)
                console.print(f"  {stall.round} {name:18}{stall}", highlight=False)
            else:
                training = results.training[name] = Training(**answer["training"])
                console.print(f"  {name:18}{training}", highlight=False)
    except subprocess.CalledProcessError as error:
        names = ", ".join(targets)
        console.print(f"[red]{names} failed:[/]\n{error.stderr[-2000:]}")
        results.add_failure(names, error.stderr[-2000:])
    finally:
        for target in targets.values():
            empty(target, environment)


if __name__ == "__main__":
    main()
