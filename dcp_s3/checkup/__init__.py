"""Examines what training will meet. The function is `dcp_s3.doctor`; a package of that name would hide it."""
