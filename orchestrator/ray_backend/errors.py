"""Errors of the Ray cluster that a command uses."""

from gpu_catalog.errors import UserError


class ClusterError(UserError):
    """The cluster cannot be used."""


class RayEndedError(ClusterError):
    """A process of the driver's own Ray has ended; a new Ray can be started."""


class LeaveTuneError(BaseException):
    """Passes through Tune, which would clear up after any other error: a dead GCS never answers."""
