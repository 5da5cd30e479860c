"""Operations outside of saves and loads by DCP: read, verify, copy, export; and loads of safetensors files."""
