"""DCP's contract on S3: stager, writer, reader, bucket planning, commit."""
