# SPDX-License-Identifier: Apache-2.0
"""Every refusal and fault that a user can meet, each with its exit code.

OverlayError                1   failed, nothing was changed
 ├─ UsageError              2   bad arguments or configuration
 │   └─ ConfigError         2   deploy.toml cannot be used
 ├─ DifferencesError        3   a check found differences or problems
 ├─ ConflictError           4   the installed files are not the ones the plan was made for
 ├─ LockedError             5   another deployment holds the lock
 ├─ RolledBackError         6   failed half-way, everything was put back
 ├─ RollbackIncompleteError 7   failed half-way, and not everything could be put back
 └─ ConnectionFailedError   8   the host cannot be reached or trusted
     ├─ HostKeyError        8   unknown, changed or revoked host key
     └─ AuthenticationError 8   the host refused every credential
"""

from __future__ import annotations


class OverlayError(Exception):
    """A failure that left everything as it was.

    Args:
        what: One sentence that says what went wrong, with the file, host or key it happened to.
        why: The cause, where it is known and not already in `what`.
        next_step: The command or change that gets the user further. The command line puts the option that selects its
            target (`--host NAME`) in the place of `{target}`.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next_step = next_step

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why:  {self.why}")
        if self.next_step:
            lines.append(f"  next: {self.next_step}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """The error as `--json` prints it."""
        return {
            "exit_code": self.exit_code,
            "error": type(self).__name__,
            "what": self.what,
            "why": self.why,
            "next": self.next_step,
        }


class UsageError(OverlayError):
    """The command was called with arguments that cannot be used."""

    exit_code = 2


class ConfigError(UsageError):
    """`deploy.toml` is missing, broken, or holds an unknown or bad key."""


class DifferencesError(OverlayError):
    """A check ran and found differences or problems."""

    exit_code = 3


class ConflictError(OverlayError):
    """Installed files differ from the base that was patched, or changed since the plan was made."""

    exit_code = 4


class LockedError(OverlayError):
    """Another deployment on the host holds the lock."""

    exit_code = 5


class RolledBackError(OverlayError):
    """A change failed half-way and was undone; the host is as it was before."""

    exit_code = 6


class RollbackIncompleteError(OverlayError):
    """A change failed half-way and could not be undone completely; `next_step` holds the manual recovery."""

    exit_code = 7


class ConnectionFailedError(OverlayError):
    """The host cannot be reached, or the connection was lost or timed out."""

    exit_code = 8


class HostKeyError(ConnectionFailedError):
    """The host key is unknown, differs from the known one, or is revoked; no credential was offered."""


class AuthenticationError(ConnectionFailedError):
    """The host refused every credential that was offered."""


#: Exit codes as the README documents them.
EXIT_CODES = {
    0: "done, or nothing to do",
    1: "failed; nothing was changed",
    2: "bad arguments or configuration",
    3: "differences or findings (verify, doctor, tune, --exit-code, --check, --try)",
    4: "conflict: files are not the expected base, or changed since the plan",
    5: "another deployment holds the lock",
    6: "failed half-way; rolled back cleanly",
    7: "failed half-way; not put back completely, recovery lines are printed",
    8: "connection, host key or authentication failed",
    130: "interrupted",
}
