"""Hand-sharded models: shards that DCP is told of, where no DTensor does it."""
