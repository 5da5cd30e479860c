from __future__ import annotations

import os

import tests.preload

if os.environ.get("DCP_S3_TEST_INTEGRATIONS"):
    # Its import takes seconds: once for all ranks, if the fork server does not run yet.
    tests.preload.MODULES.append("megatron.core.dist_checkpointing")
