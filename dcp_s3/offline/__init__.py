"""Operations that need no process group: read, inspect, compare, verify, copy, export, import."""
