"""`dcp_s3.doctor`, which checks a host and a store before a run. A package called `doctor` would hide the function."""
