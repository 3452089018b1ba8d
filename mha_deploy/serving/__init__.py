"""`serve`: a bundle's artifact behind the Open Inference Protocol v2.

limits.py      what one client may ask of memory and time
wire.py        raw bytes or JSON values -> arrays
protocol.py    a request's body -> tensors and wishes
rows.py        padded tensors -> ragged requests; answers -> y
faults.py      errors -> HTTP status, gRPC code, counter
stats.py       counts, Triton's statistics, the last minutes
metrics.py     Prometheus text
model.py       the served model, in the protocol's words, and requests' way through the runner
security.py    the address rule, the token, TLS
body.py        bodies, read within limits [aiohttp]
connection.py  heads, read within limits [aiohttp]
answer.py      an answer -> bytes on the connection [aiohttp]
http.py        paths -> handlers [aiohttp]
grpc_messages.py  infer messages -> tensors and wishes [protobuf, when used]
grpc.py        the same over gRPC [tritonclient, when used]
page.html      the live page
server.py      start, signals, drain
"""

from __future__ import annotations

from mha_deploy.serving.limits import Limits
from mha_deploy.serving.security import Tls, read_token
from mha_deploy.serving.server import ServeOptions, Server, ServeReport, serve

__all__ = ["Limits", "ServeOptions", "ServeReport", "Server", "Tls", "read_token", "serve"]
