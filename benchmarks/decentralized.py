"""What a save without collectives costs the rank that merges it, in simulation: seconds, requests, bytes, memory.

``python -m benchmarks.decentralized --ranks 256,1024,4096 --items 64`` makes the parts that so many ranks would write
(`benchmarks.coordinator` says what they hold) and puts them into a store in memory, each of whose requests takes 30 ms
more. Then one rank does what `dcp_s3.coordination` does once all have written:

- ``list``: the names of intents and parts, a page of 1,000 after the other.
- ``roll call``: all intents, and whether any rank holds what none will write.
- ``get and add``: the parts, each added to the merge as it comes.
- ``merge``: `.metadata`, from all parts; some of it is read back.
- ``commit``: what is to become `.metadata`, the manifest, then `.metadata`.

Beside it stands what the coordinator does in a save with collectives, in this process and without any network: it
unpickles plans, makes the global plan, unpickles results, and makes `.metadata` and the manifest of them. That the
gather and the scatter themselves take time comes on top.

Peak memory is what the process holds more than before the step began, parts as they were received included.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.coordinator import State, local_plan, results_of
from benchmarks.measure import Sample, measure
from benchmarks.report import machine
from benchmarks.save_load import RESULTS
from benchmarks.units import MIB
from dcp_s3.checkpoint.commit import check_readable
from dcp_s3.coordination.merge import MergedSave, Merging, assign
from dcp_s3.coordination.values import Intent, Key, parse_intent
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import METADATA, joint_object, manifest_object
from dcp_s3.format.metadata import dump_metadata
from dcp_s3.format.part import Part, WrittenItem, encode, item_hash
from dcp_s3.save.objects import ItemWriteResult
from dcp_s3.store import Expect, Page, StoredObject
from dcp_s3.url import parse_url
from tests.memory_store import MemoryStore

SAVE = "0123456789abcdef"
_URL = "s3://bench/run/step-1"
_AT_A_TIME = 64


class DistantStore(MemoryStore):
    """A store in memory whose requests take a while; it counts them."""

    def __init__(self, latency: float) -> None:
        super().__init__("distant")
        self.latency = latency
        self.requests: Counter[str] = Counter()
        self.nbytes = 0
        """Bytes read and written."""
        self._lock = threading.Lock()

    def get(self, key: str) -> StoredObject:
        found = super().get(key)
        self._request("GET", len(found.data))
        return dataclasses.replace(found, data=bytes(bytearray(found.data)))  # as received: in memory of its own

    def put(self, key: str, data: bytes | memoryview, **options: Any) -> None:
        super().put(key, data, **options)
        self._request("PUT", len(data))

    def page(self, prefix: str, delimiter: str = "", *, token: str | None = None) -> Page:
        self._request("LIST", 0)
        return super().page(prefix, delimiter, token=token)

    def _request(self, kind: str, nbytes: int) -> None:
        time.sleep(self.latency)
        with self._lock:
            self.requests[kind] += 1
            self.nbytes += nbytes


@dataclass(frozen=True)
class Run:
    """What one number of ranks costs."""

    steps: dict[str, Sample]
    whole: Sample
    """All steps together."""
    requests: dict[str, int]
    nbytes: int
    """Bytes read and written."""
    part_bytes: int
    """Mean bytes of a part."""
    metadata_bytes: int
    with_collectives: dict[str, Sample]
    """The coordinator's steps."""


def parts_of(state: State, ranks: int) -> Iterator[tuple[Intent, bytes]]:
    """Intent and part of each rank: what all have, each writes a share of."""
    for rank in range(ranks):
        held = local_plan(state, ranks, rank)
        shared = {*state.replicated, *state.objects}
        written = [
            item for item in held.items if item.index.fqn not in shared or _owner(item.index.fqn, state, ranks) == rank
        ]
        results = results_of(rank, SavePlan(written))
        items = tuple(
            WrittenItem(item.index, item.tensor_data, result.storage_data, item.type == WriteItemType.SHARD)
            for item, result in zip(written, results, strict=True)
        )
        objects = tuple(
            each.object_entry for each in results if isinstance(each, ItemWriteResult) and each.object_entry is not None
        )
        paths = {item.index.fqn: held.planner_data[item.index.fqn] for item in written}
        common = [item for item in held.items if item.index.fqn in shared]
        owned = [_owner(item.index.fqn, state, ranks) == rank for item in common]
        writes, leaves = (
            tuple(item_hash(item) for item, is_own in zip(common, owned, strict=True) if is_own == wanted)
            for wanted in (True, False)
        )
        facts = {"started_at": 0.0, "by": rank}
        intent = Intent(f"{rank:016x}", 0, SAVE, writes, leaves)
        yield intent, encode(Part(SAVE, rank, ranks, items, objects, paths, facts))


def _owner(fqn: str, state: State, ranks: int) -> int:
    return [*state.replicated, *state.objects].index(fqn) % ranks


def simulate(ranks: int, items: int, latency: float, *, with_collectives: bool = True) -> Run:
    """One save of so many ranks."""
    state, store = State.of(items), DistantStore(0)
    sizes = []
    for rank, (intent, data) in enumerate(parts_of(state, ranks)):
        sizes.append(len(data))
        store.put(Key("part", SAVE, rank).path, data)
        store.put(Key("intent", SAVE, rank).path, intent.to_json())
    store.latency, store.nbytes = latency, 0
    store.requests.clear()
    run = _Merge(store, ranks)
    whole = measure(run)
    if run.merged.items != state.stored(ranks):
        raise RuntimeError(f"{run.merged.items} items were merged of {state.stored(ranks)}")
    found = Run(run.steps, whole, dict(store.requests), store.nbytes, sum(sizes) // ranks, len(run.merged.metadata), {})
    del run, store
    return dataclasses.replace(found, with_collectives=collectives(state, ranks)) if with_collectives else found


class _Merge:
    """What the merging rank does; notes what each step cost."""

    def __init__(self, store: DistantStore, ranks: int) -> None:
        self._store, self._ranks = store, ranks
        self.steps: dict[str, Sample] = {}
        self.merged: MergedSave

    def __call__(self) -> None:
        merging, sample = Merging(SAVE, self._ranks), Merging(SAVE, self._ranks)
        self._step("list", lambda: self._store.list(joint_object(SAVE, "")))
        self._step("roll call", self._call_roll)
        self._step("get and add", lambda: self._get(merging, sample))
        self._step("merge", lambda: self._merge(merging, sample))
        self._step("commit", self._commit)

    def _read(self, kind: str) -> Iterator[bytes]:
        keys = [Key(kind, SAVE, rank).path for rank in range(self._ranks)]
        with ThreadPoolExecutor(_AT_A_TIME, "get") as pool:
            for start in range(0, self._ranks, 256):
                yield from pool.map(lambda key: self._store.get(key).data, keys[start : start + 256])

    def _call_roll(self) -> None:
        intents = [parse_intent(data) for data in self._read("intent")]
        leaves = [np.array([] if each is None else each.leaves, np.uint64) for each in intents]
        writes = [np.array([] if each is None else each.writes, np.uint64) for each in intents]
        if assign(leaves, writes):
            raise RuntimeError("something would be written by no rank")

    def _get(self, merging: Merging, sample: Merging) -> None:
        for rank, data in enumerate(self._read("part")):
            if merging.add(data) or not rank:
                sample.add(data)

    def _merge(self, merging: Merging, sample: Merging) -> None:
        self.merged = merging.merged(save_id=SAVE + "00000000", checkpoint_id=_URL)
        few = sample.merged(save_id=SAVE + "00000000", checkpoint_id=_URL, is_whole=False)
        check_readable(few.metadata, parse_url(_URL))

    def _commit(self) -> None:
        merged = self.merged
        self._store.put(Key("merged", SAVE + "00").path, merged.metadata)
        manifest = Manifest(SAVE + "00000000", time.time(), 1, self._ranks, merged.objects, merged.items)
        self._store.put(manifest_object(manifest.save_id), manifest.to_json())
        self._store.put(METADATA, merged.metadata, expect=Expect())

    def _step(self, name: str, function: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        function()
        self.steps[name] = Sample(time.perf_counter() - wall, time.process_time() - cpu, 0)


def collectives(state: State, ranks: int) -> dict[str, Sample]:
    """What the coordinator does in a save with collectives, without any network."""
    steps: dict[str, Sample] = {}
    kept: dict[str, Any] = {}

    def step(name: str, function: Callable[..., Any], *arguments: str) -> None:
        steps[name] = measure(lambda: kept.update({name: function(*(kept.pop(each) for each in arguments))}))

    gc.disable()  # or DCP's part takes several times as long
    try:
        kept["sent"] = [pickle.dumps(local_plan(state, ranks, rank)) for rank in range(ranks)]
        step("unpickle the plans", lambda sent: list(map(pickle.loads, sent)), "sent")
        step("create_global_plan", DefaultSavePlanner().create_global_plan, "unpickle the plans")
        plans, metadata = kept.pop("create_global_plan")
        kept["sent"] = [pickle.dumps(results_of(rank, plan)) for rank, plan in enumerate(plans)]
        del plans
        step("unpickle the results", lambda sent: list(map(pickle.loads, sent)), "sent")

        def finish(results: list[list[WriteResult]]) -> None:
            metadata.storage_data = {each.index: each.storage_data for rank in results for each in rank}
            kept["metadata"] = dump_metadata(metadata)

        step("finish", finish, "unpickle the results")
    finally:
        gc.enable()
    return steps


# --- the report -----------------------------------------------------------------------------------


def show(items: int, found: dict[int, Run], console: Console) -> None:
    """Print a table with a column for each number of ranks."""
    table = Table("", title=f"A save without collectives, {items} items a rank: what the merging rank does")
    for ranks in found:
        table.add_column(f"{ranks:,} ranks", justify="right")
    runs = list(found.values())
    for name in runs[0].steps:
        table.add_row(f"{name}, seconds", *(f"{run.steps[name].wall_seconds:.2f}" for run in runs))
    table.add_row("together, seconds", *(f"{run.whole.wall_seconds:.2f}" for run in runs), style="bold")
    table.add_row("CPU seconds", *(f"{run.whole.cpu_seconds:.2f}" for run in runs))
    table.add_row("requests", *(f"{sum(run.requests.values()):,}" for run in runs))
    table.add_row("MiB of a part", *(f"{run.part_bytes / MIB:.3f}" for run in runs))
    table.add_row("MiB of .metadata", *(f"{run.metadata_bytes / MIB:.0f}" for run in runs))
    table.add_row("MiB read and written", *(f"{run.nbytes / MIB:.0f}" for run in runs))
    table.add_row("peak memory, MiB", *(f"{run.whole.peak_bytes / MIB:.0f}" for run in runs), style="bold")
    if all(run.with_collectives for run in runs):
        table.add_section()
        for name in runs[0].with_collectives:
            seconds = (run.with_collectives[name].wall_seconds for run in runs)
            table.add_row(f"with collectives: {name}, seconds", *map("{:.2f}".format, seconds), style="dim")
        samples = [list(run.with_collectives.values()) for run in runs]
        seconds = (sum(each.wall_seconds for each in steps) for steps in samples)
        table.add_row("with collectives, together, seconds", *map("{:.2f}".format, seconds))
        peaks = (max(each.peak_bytes for each in steps) / MIB for steps in samples)
        table.add_row("with collectives: peak memory of a step, MiB", *map("{:.0f}".format, peaks))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark as the command line says; print a table, write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decentralized", description="What a save without collectives costs who merges it."
    )
    parser.add_argument(
        "--ranks",
        type=lambda text: sorted({int(number) for number in text.split(",")}),
        default=[256, 1024, 4096],
        metavar="N,...",
        help="default: 256,1024,4096",
    )
    parser.add_argument("--items", type=int, default=64, help="of a rank; default: %(default)s")
    parser.add_argument("--latency", type=float, default=0.03, help="of a request, seconds; default: %(default)s")
    parser.add_argument("--alone", action="store_true", help="leave out the save with collectives")
    parser.add_argument("--json", type=Path, default=RESULTS / "decentralized.json", help="default: %(default)s")
    options = parser.parse_args(arguments)
    found: dict[int, Run] = {}
    for ranks in options.ranks:
        found[ranks] = simulate(ranks, options.items, options.latency, with_collectives=not options.alone)
    show(options.items, found, Console(width=None if sys.stdout.isatty() else 140))
    runs = {ranks: asdict(run) for ranks, run in found.items()}
    fields = {"machine": machine(), "items": options.items, "latency": options.latency, "ranks": runs}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(fields, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
