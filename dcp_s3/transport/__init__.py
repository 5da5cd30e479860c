"""S3: clients, retries, multipart upload from buffers, ranged GET into buffers. Knows nothing of tensors."""
