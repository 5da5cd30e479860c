"""One case, one round, in a process of its own: prints what it measured as a line of JSON.

Run by :mod:`benchmarks.save_load`; by hand it helps with profiling::

    python -m benchmarks.worker '{"case": "dcp_s3", "size": 1073741824, "target": {...}}'
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import asdict, dataclass

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.cases import CASES, Case, Target
from benchmarks.llama import llama_state
from benchmarks.measure import Sample, measure
from benchmarks.units import MIB

#: Saved and loaded before anything is measured, so that imports, clients and threads are there.
_WARM_UP_BYTES = 4 * MIB


@dataclass(frozen=True)
class Outcome:
    """A save and a load of the same state by one case."""

    state_bytes: int
    save: Sample
    load: Sample


def run_case(case: Case, size: int) -> Outcome:
    """Save ``size`` bytes, load them into other memory, compare every bit.

    Raises:
        RuntimeError: what was loaded is not what was saved.
    """
    _save_and_load(case, "warm-up", llama_state(_WARM_UP_BYTES))
    state = llama_state(size)
    return _save_and_load(case, "checkpoint", state)


def _save_and_load(case: Case, name: str, state: dict[str, torch.Tensor]) -> Outcome:
    loaded = {key: torch.full_like(tensor, -2.0) for key, tensor in state.items()}
    save = measure(lambda: dcp.save(state, storage_writer=case.writer(name), no_dist=True))
    load = measure(lambda: dcp.load(loaded, storage_reader=case.reader(name), no_dist=True))
    for key, tensor in state.items():
        # As integers: equal floats need not be the same bits.
        if not torch.equal(tensor.view(torch.int32), loaded[key].view(torch.int32)):
            raise RuntimeError(f"{key} was not loaded as it was saved")
    return Outcome(sum(tensor.nbytes for tensor in state.values()), save, load)


def main() -> None:
    """Run the case that the first argument (JSON) describes."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    request = json.loads(sys.argv[1])
    case = CASES[request["case"]](Target(**request["target"]))
    try:
        outcome = run_case(case, request["size"])
    finally:
        case.clean_up()
    print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
