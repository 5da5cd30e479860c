"""What lies under a root, for people: the report (`dcp-s3 report`) and the live view (`dcp-s3 top`)."""
