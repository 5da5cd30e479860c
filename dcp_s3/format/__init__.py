"""The bytes and names of a checkpoint on S3: framing, layout, manifest, metadata. No I/O."""
