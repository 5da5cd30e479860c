"""Kills a training run in the middle of a save to S3, restarts it elsewhere, checks every bit, and cleans up.

``python -m examples.demo`` needs no setup: the S3 server is moto, in this process. With
``--url s3://bucket/prefix`` it runs on a real bucket, in a new directory below that prefix, with the
credentials from AWS's own chain (and DCP_S3_ENDPOINT_URL, for other stores).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

import dcp_s3
from dcp_s3.errors import DcpS3Error
from examples.demo.acts import Demo, DemoError
from examples.demo.report import Report
from examples.demo.storage import BUCKET, BucketView, embedded_server
from examples.demo.workers import WorkerError

#: Seconds for one run of the training. The network to a real bucket may be slow.
LIMIT_EMBEDDED, LIMIT_URL = 150.0, 1800.0
#: Small parts, few at a time: a state of 60 MB is then uploaded like one of many gigabytes, in
#: several multipart uploads at once, and takes long enough to be interrupted.
UPLOAD_SETTINGS = {"DCP_S3_PART_SIZE": "5MiB", "DCP_S3_CONCURRENCY": "1"}


def main() -> int:
    """Run the demo with the options of the command line. Returns the exit status."""
    options = _parse_arguments()
    # As with Ctrl-C, the finally clauses must run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = Report()
    folder = Path(tempfile.mkdtemp(prefix="dcp-s3-demo-"))
    try:
        return _run(options.url, folder, report)
    except (DemoError, WorkerError, DcpS3Error, BotoCoreError, ClientError) as error:
        report.error(f"The demo has failed: {error}")
        return 1
    except ModuleNotFoundError as error:
        report.error(f"{error}. Remedy: pip install 'dcp-s3[demo]'")
        return 1
    except KeyboardInterrupt:
        report.error("Interrupted; nothing is left running.")
        return 128 + signal.SIGINT
    finally:
        if options.keep:
            report.commands("Logs and digests", [str(folder)])
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _run(url: str | None, folder: Path, report: Report) -> int:
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
        for name, value in UPLOAD_SETTINGS.items():
            os.environ.setdefault(name, value)
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
    return 0 if all(check.holds for check in demo.checks) else 1


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


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Kill a training run in the middle of a save to S3, restart it, and check every bit.",
    )
    parser.add_argument("--url", help="s3://bucket/prefix of a real bucket; default: embedded server")
    parser.add_argument("--keep", action="store_true", help="keep the workers' logs and digests")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
