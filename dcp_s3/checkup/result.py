"""What a check found, and all of it together. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dcp_s3 import errors
from dcp_s3.reprs import one_line

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    >>> doctor("s3://bucket/run")["PutObject"].status
    'ok'
    """

    name: str
    """Name of the check."""
    status: Status
    """``failed``: saves or loads will not work. ``warning``: they work, and something is to be known. ``skipped``: not
    checked."""
    found: str
    """What was found: a clause for people."""
    remedy: str = ""
    """What to do about it; empty if nothing."""
    seconds: float = 0.0
    """Seconds that the check took."""

    def __repr__(self) -> str:
        return one_line("CheckResult", repr(self.name), self.status, " ".join(self.found.split()))

    @property
    def passed(self) -> bool:
        """Whether checks that build on this one make sense."""
        return self.status in ("ok", "warning")


@dataclass(frozen=True)
class DoctorReport:
    """What `dcp_s3.doctor` found. ``print`` shows it as plain text.

    >>> report = doctor("s3://bucket/run")
    >>> report.ok, [check.name for check in report.failed]
    (True, [])
    """

    url: str
    """URL that was examined."""
    read_only: bool
    """Whether everything that writes was left out."""
    checks: tuple[CheckResult, ...]
    """The checks, in the order in which they were made."""
    policies: Mapping[str, Mapping[str, Any]]
    """IAM policies for this bucket and prefix: ``training`` (save, load, prune), and ``prune_versions``: what pruning
    all versions needs besides."""
    seconds: float = 0.0
    """Seconds that all checks took."""
    denied: bool = False
    """Whether a permission was refused, so that a policy helps."""

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return self.having("failed")

    @property
    def warnings(self) -> tuple[CheckResult, ...]:
        """The checks that found something to be known."""
        return self.having("warning")

    def having(self, status: Status) -> tuple[CheckResult, ...]:
        """The checks of one status."""
        return tuple(each for each in self.checks if each.status == status)

    def __getitem__(self, name: str) -> CheckResult:
        """The check of that name.

        Raises:
            KeyError: it was not made.
        """
        found = next((each for each in self.checks if each.name == name), None)
        if found is None:
            raise KeyError(f"no check {name!r} was made; there are: {', '.join(each.name for each in self.checks)}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "url": self.url,
            "ok": self.ok,
            "read_only": self.read_only,
            "seconds": self.seconds,
            "checks": [asdict(each) for each in self.checks],
            "policies": dict(self.policies),
        }

    def __repr__(self) -> str:
        return (
            f"DoctorReport({self.url!r}, {len(self.checks)} checks, {len(self.failed)} failed, "
            f"{len(self.warnings)} warnings)"
        )

    def __str__(self) -> str:
        from dcp_s3.checkup.show import to_text  # it imports this module

        return to_text(self)


def passed(name: str, found: str) -> CheckResult:
    """A result without objections."""
    return CheckResult(name, "ok", found)


def warned(name: str, found: str, remedy: str) -> CheckResult:
    """A result that is to be known."""
    return CheckResult(name, "warning", found, remedy)


def failed(name: str, found: str, remedy: str) -> CheckResult:
    """A result with which saves or loads will not work."""
    return CheckResult(name, "failed", found, remedy)


def skipped(name: str, found: str, remedy: str = "") -> CheckResult:
    """A check that was not made, or could not tell."""
    return CheckResult(name, "skipped", found, remedy)


def from_error(name: str, error: Exception, *, status: Status = "failed", consequence: str = "") -> CheckResult:
    """The result for an error of `dcp_s3.errors`, whose message ends with the remedy.

    Args:
        name: name of the check.
        error: the error.
        status: how bad it is.
        consequence: what it means, if the message does not say.
    """
    found, _, remedy = str(error).partition(". Remedy: ")
    if isinstance(error, errors.SettingsError) and not remedy:
        remedy = "correct it, or unset it"
    return CheckResult(name, status, f"{found}: {consequence}" if consequence else found, remedy)
