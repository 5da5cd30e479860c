"""S3: clients, retries, uploads from buffers, ranged GETs into buffers, hedging. Knows nothing of tensors."""
