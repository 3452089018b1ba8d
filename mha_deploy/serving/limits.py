"""What one client may ask of the server's memory and time."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mha_deploy.errors import InputError

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes are of one request unless said otherwise; times are in seconds.

    `body_bytes` holds for a body as it is sent and, where it is compressed, again for what it unpacks
    to. `json_bytes` is lower, since a parsed JSON text takes some twenty times its size.
    `bodies_bytes` bounds what all requests in progress hold together, so that many slow senders cannot
    fill the memory. A body must arrive within `body_s` plus the time that it takes at
    `body_bytes_per_s`. `request_s` is the deadline of a request that brings none of its own, so that no
    client waits for ever on a session that hangs.

    Raises:
        InputError: a limit that is not a number above 0, such as nan or inf; `body_bytes` above
            `bodies_bytes`.
    """

    body_bytes: int = 64 * MIB
    json_bytes: int = 16 * MIB
    bodies_bytes: int = 512 * MIB
    header_bytes: int = 64 * KIB
    tensors: int = 8
    json_depth: int = 16
    id_chars: int = 1024
    connections: int = 1024
    header_s: float = 10.0
    body_s: float = 10.0
    body_bytes_per_s: int = 64 * KIB
    idle_s: float = 75.0
    write_s: float = 30.0
    request_s: float = 60.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not 0 < value < math.inf:
                raise InputError(f"{limit.name} = {value}; expected a finite number above 0")
        if self.body_bytes > self.bodies_bytes:
            raise InputError(
                f"body_bytes = {self.body_bytes}; expected at most bodies_bytes = {self.bodies_bytes}, what "
                "the bodies of all requests hold together: a larger one could never be read"
            )


DEFAULT_LIMITS = Limits()
