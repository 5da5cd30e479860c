"""Runs the demo, on a server of its own or below a URL."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError
from rich.table import Table

import dcp_s3
from dcp_s3.demo.acts import Demo, DemoError
from dcp_s3.demo.environment import slow_uploads_down
from dcp_s3.demo.report import Report
from dcp_s3.demo.storage import BUCKET, BucketView, embedded_server
from dcp_s3.demo.workers import WorkerError
from dcp_s3.errors import DcpS3Error
from dcp_s3.retention.plan import Plan

#: Seconds for one run of the training. The network to a real bucket may be slow.
LIMIT_EMBEDDED, LIMIT_URL = 150.0, 1800.0


def run_demo(url: str | None, *, keep: bool, plan_table: Callable[[Plan], Table]) -> bool:
    """Run the demo, print what happens, and change this process's environment so that it leads to the demo's server.

    Args:
        url: s3://bucket/prefix of a real bucket, with the credentials of AWS's own chain; the demo makes a new
            directory below it. None: moto's server, in this process.
        keep: whether the local directory with the workers' logs and digests stays.
        plan_table: draws what retention keeps and deletes.

    Returns:
        Whether everything that the demo promises held.
    """
    report = Report(plan_table)
    folder = Path(tempfile.mkdtemp(prefix="dcp-s3-demo-"))
    try:
        return _run(url, folder, report)
    except (DemoError, WorkerError, DcpS3Error, BotoCoreError, ClientError) as error:
        report.error(f"The demo has failed: {error}")
        return False
    except ModuleNotFoundError as error:
        report.error(f"{error}. Remedy: pip install 'moto[server]>=5.1'")
        return False
    except KeyboardInterrupt:
        report.error("Interrupted; nothing is left running.")
        raise
    finally:
        if keep:
            report.commands("Logs and digests", [str(folder)])
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _run(url: str | None, folder: Path, report: Report) -> bool:
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        if url is None:
            report.stage("An S3 server", "moto, inside this process: nothing to install, nothing is left.")
            endpoint = stack.enter_context(embedded_server())
            root = f"s3://{BUCKET}/run"
            report.say(f"{root} at {endpoint}")
        else:
            root = f"{url.rstrip('/')}/demo-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
            report.stage("Your bucket", f"Everything goes below {root}")
        slow_uploads_down()
        storage = BucketView(root)
        dcp_s3.latest(root)  # fails here, with a clear message, if the bucket cannot be reached
        if url is not None:
            stack.callback(_say_how_to_remove, storage, report)
        demo = Demo(storage, folder, LIMIT_EMBEDDED if url is None else LIMIT_URL, report)
        interrupted = demo.train_and_kill()
        newest = demo.show_interrupted(interrupted)
        demo.restart(newest, interrupted)
        demo.compare(newest)
        demo.show_storage(interrupted)
        demo.retain(interrupted)
        report.checks(demo.checks, time.monotonic() - started)
    return all(check.holds for check in demo.checks)


def _say_how_to_remove(storage: BucketView, report: Report) -> None:
    endpoint = dcp_s3.Settings().endpoint_url
    option = f" --endpoint-url {shlex.quote(endpoint)}" if endpoint else ""
    commands = [f"aws{option} s3 rm --recursive {shlex.quote(storage.root)}/"]
    commands += [
        f"aws{option} s3api abort-multipart-upload --bucket {shlex.quote(storage.bucket)} "
        f"--key {shlex.quote(key)} --upload-id {shlex.quote(upload_id)}"
        for directory in storage.look()
        for key, upload_id in directory.uploads
    ]
    report.commands("To remove what the demo has left on S3", commands)
