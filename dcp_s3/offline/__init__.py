"""What needs no process group: read single tensors, verify, download and upload."""
