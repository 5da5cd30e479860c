"""DCP's StorageReader: a plan becomes ranges of objects, which are fetched, verified and put in place."""
