"""Tests of the adapters with the real frameworks: `make test-integrations`, in an environment that has them.

`make test` has none of them and collects nothing here.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("DCP_S3_TEST_INTEGRATIONS") else ["test_*.py", "*/test_*.py"]
