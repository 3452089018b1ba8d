"""Every error that mha-deploy raises on purpose.

    MhaDeployError                  exit code
    ├── InputError                      2      what was given is wrong
    │   ├── SpecError                          a spec, a preset name, a dim
    │   ├── WeightsError                       a checkpoint that does not hold the block
    │   ├── BundleError                        a bundle folder or its manifest
    │   ├── GraphError                         an ONNX file that cannot be read or run
    │   ├── FeedError                          tensors that do not meet a signature
    │   └── BenchError                         what cannot be measured, or held against a measurement
    ├── SessionError                    2      a session used against its contract
    ├── RunnerError                     3      a runner that cannot take or finish a request now
    │   ├── QueueFullError                     no room for another request
    │   ├── DeadlineError                      a request's time is over, or would be before its answer
    │   └── RunnerClosedError                  the runner is closing or closed
    ├── CheckError                      1      something ran, was checked, and is wrong
    │   └── FrozenAxisError                    a dynamic axis that is not dynamic
    └── MissingError                    3      this machine lacks a package, a provider or a GPU

A message is one short paragraph: what was given, what was expected, what to do.
"""

from __future__ import annotations


class MhaDeployError(Exception):
    """Root of the tree. `exit_code` is what the command line ends with."""

    exit_code = 2


class InputError(MhaDeployError):
    """What the user gave cannot be used."""


class SpecError(InputError):
    """The description of the attention block is wrong."""


class WeightsError(InputError):
    """A checkpoint cannot be read or does not hold the block that the spec describes."""


class BundleError(InputError):
    """A bundle folder cannot be read or written, or its contents do not match its manifest."""


class GraphError(InputError):
    """An ONNX file cannot be parsed, checked or run."""


class FeedError(InputError):
    """Named tensors do not meet the signature they were given for."""


class BenchError(InputError):
    """Something cannot be measured as asked, or held against the measurement that was given."""


class SessionError(MhaDeployError):
    """A session was used against its contract: after close, or from a second thread."""


class RunnerError(MhaDeployError):
    """A runner cannot take, or cannot finish, a request at this time; the request is not at fault."""

    exit_code = 3


class QueueFullError(RunnerError):
    """A runner's queue has no room; `retry_after_s` is when it predicts to have some."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(RunnerError):
    """A request's deadline has passed (`predicted` False), or its answer would come after it (True)."""

    def __init__(self, message: str, *, predicted: bool) -> None:
        super().__init__(message)
        self.predicted = predicted


class RunnerClosedError(RunnerError):
    """The runner takes no requests any more, or was closed before this one was answered."""


class CheckError(MhaDeployError):
    """Something ran and was checked, and the result is wrong."""

    exit_code = 1


class FrozenAxisError(CheckError):
    """An axis that was declared dynamic holds one size only."""


class MissingError(MhaDeployError):
    """This machine lacks what was asked for; the message says how to bring it."""

    exit_code = 3
