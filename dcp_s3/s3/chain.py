"""Endpoint and region from AWS's own chain (its variables, then the profile), where the settings say nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import botocore.exceptions as boto
import botocore.session

from dcp_s3.errors import SettingsError
from dcp_s3.settings import Settings, aws_endpoint_variable, aws_variable, require_endpoint


@dataclass(frozen=True)
class ChainValue:
    """A value from the chain."""

    source: str
    """Where the value is set: a variable, or a field of a profile."""
    value: str
    """The value itself."""


def find_endpoint(session: Any) -> ChainValue | None:
    """The endpoint of S3 that botocore will choose; None for AWS's own.

    Args:
        session: session of botocore or aiobotocore.

    Raises:
        botocore.exceptions.BotoCoreError: the profile is missing or cannot be read.
    """
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    variable = aws_endpoint_variable()
    if variable is not None:
        return ChainValue(*variable)
    profile = session.get_scoped_config()
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    of_s3 = services.get("s3")
    value = (of_s3.get("endpoint_url") if isinstance(of_s3, dict) else None) or profile.get("endpoint_url")
    return ChainValue(f"endpoint_url of {_profile(session)}", str(value)) if value else None


def find_region(session: Any) -> ChainValue | None:
    """The region that botocore will choose; None if there is none."""
    variable = aws_variable("AWS_DEFAULT_REGION")
    if variable is not None:
        return ChainValue(*variable)
    value = session.get_config_variable("region")
    return ChainValue(f"region of {_profile(session)}", str(value)) if value else None


def find_chain(settings: Settings) -> dict[str, ChainValue]:
    """The chain's values for the settings that are left to it, by setting name.

    Raises:
        SettingsError: the endpoint is invalid, or the profile is missing or cannot be read.
    """
    session = botocore.session.Session(profile=settings.profile)
    try:
        session.get_scoped_config()  # raises if the profile is missing, even if nothing of it is needed
        if settings.endpoint_url is None:
            check_endpoint_of(session)
        found = {
            "endpoint_url": find_endpoint(session) if settings.endpoint_url is None else None,
            "region": find_region(session) if settings.region is None else None,
        }
    except boto.BotoCoreError as error:
        raise SettingsError(f"AWS's own configuration cannot be read: {error}") from None
    return {name: each for name, each in found.items() if each is not None}


def check_endpoint_of(session: Any) -> None:
    """Refuse an invalid endpoint early and by its source: botocore raises a bare ValueError for it.

    Raises:
        SettingsError: the endpoint is invalid.
        botocore.exceptions.BotoCoreError: the profile is missing or cannot be read.
    """
    found = find_endpoint(session)
    if found is not None:
        require_endpoint(found.source, found.value)


def _profile(session: Any) -> str:
    return f"profile {session.profile or 'default'!r} in {session.get_config_variable('config_file')}"
