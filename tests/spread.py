"""Checkpoints as earlier versions wrote them with their setting ``prefix_spread``."""

from __future__ import annotations

from typing import Any

from dcp_s3.format.layout import METADATA, METADATA_CRC_KEY, What, classify, spread
from dcp_s3.format.metadata import dump_metadata, load_metadata
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.url import parse_url


def spread_out(s3: Any, url: str, digits: int = 2) -> str:
    """Move the data of a checkpoint into directories of that many hex digits, named by a hash; returns its URL."""
    where = parse_url(url)
    begin = where.key("")
    listed = s3.list_objects_v2(Bucket=where.bucket, Prefix=begin)["Contents"]
    paths = [entry["Key"][len(begin) :] for entry in listed]
    moved = {path: spread(path, digits) for path in paths if classify(path).what is What.DATA}

    def put(path: str, data: bytes, metadata: dict[str, str]) -> None:
        known = {METADATA_CRC_KEY: crc_hex(crc64nvme(data))} if METADATA_CRC_KEY in metadata else {}
        s3.put_object(Bucket=where.bucket, Key=begin + path, Body=data, Metadata=metadata | known)

    manifests = [path for path in paths if classify(path).what is What.MANIFEST]
    for path in [*moved, *manifests, METADATA]:  # the commit last
        found = s3.get_object(Bucket=where.bucket, Key=begin + path)
        data = found["Body"].read()
        if path in manifests:
            for old, new in moved.items():
                data = data.replace(f'"{old}"'.encode(), f'"{new}"'.encode())
        elif path == METADATA:
            metadata = load_metadata(data, url=url)
            for info in metadata.storage_data.values():
                object.__setattr__(info, "relative_path", moved[info.relative_path])
            data = dump_metadata(metadata)
        put(moved.get(path, path), data, {name.lower(): value for name, value in found["Metadata"].items()})
    for path in moved:
        s3.delete_object(Bucket=where.bucket, Key=begin + path)
    return url
