"""Examines what training will meet: settings, credentials, endpoint, permissions, the store's abilities, the bucket.

Which file to open: ``doctor`` (the order of the checks), ``examination`` (requests, probe objects and their removal),
``result`` and ``show`` (what comes out), ``permissions`` (IAM actions and policies). The checks: ``host``,
``identity``, ``network``, ``access`` (each permission), ``conditions``, ``checksums``, ``configuration``.

The function is `dcp_s3.doctor`; a package of that name would hide it.
"""
