"""Operations that need no process group: read single tensors, verify, download and upload."""
