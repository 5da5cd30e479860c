"""DCP's StorageWriter: a plan becomes buckets, buckets become objects, and the commit makes them a checkpoint."""
