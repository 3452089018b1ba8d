"""Requests in bytes: the Open Inference Protocol with its binary tensor extension."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np

from mha_deploy.errors import InputError, RequestError
from mha_deploy.serving.wire import DATATYPES, clip, from_bytes
from mha_deploy.signature import Array, Feeds

HEAD_LENGTH = "inference-header-content-length"
Pieces = list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer: status, headers (names in lower case), body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def model_path(model: str) -> str:
    """The model's path on a server; no name reaches beyond its place in it."""
    # A name from the command line may hold what is no Unicode, which then is a name that no server has.
    return f"/v2/models/{quote(model, safe='', errors='surrogatepass')}"


class Encoding(ABC):
    """How one kind of server wants its requests, and gives its answers."""

    path: str
    headers: Mapping[str, str]

    @abstractmethod
    def body(self, feeds: Feeds) -> tuple[Pieces, dict[str, str]]:
        """A request's body in pieces, and the headers that go with it."""

    @abstractmethod
    def answer(self, reply: Reply) -> Array:
        """The first output.

        Raises:
            InputError: the body is not an answer.
        """

    def request(self, host: str, feeds: Feeds) -> Pieces:
        """The whole request."""
        pieces, own = self.body(feeds)
        length = sum(len(piece) for piece in pieces)
        headers = {"Host": host, **self.headers, **own, "Content-Length": str(length)}
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return ["\r\n".join([*lines, "\r\n"]).encode("latin-1"), *pieces]


class BinaryEncoding(Encoding):
    """JSON, then the tensors' bytes. `timeout_us` is the request's deadline; 0 is none."""

    def __init__(self, model: str, *, timeout_us: int = 0, token: str = "") -> None:
        self.path = f"{model_path(model)}/infer"
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = {"timeout": timeout_us} if timeout_us else {}
        self._parameters = {"binary_data_output": True, **timeout}

    def body(self, feeds: Feeds) -> tuple[Pieces, dict[str, str]]:
        inputs = [
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": DATATYPES[array.dtype.name],
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in feeds.items()
        ]
        head = json.dumps({"inputs": inputs, "parameters": self._parameters}, separators=(",", ":")).encode()
        raw = [array.reshape(-1).view(np.uint8).data for array in feeds.values()]
        return [head, *raw], {HEAD_LENGTH: str(len(head))}

    def answer(self, reply: Reply) -> Array:
        try:
            length = int(reply.headers[HEAD_LENGTH])
            output = json.loads(reply.body[:length])["outputs"][0]
            raw = np.frombuffer(reply.body, np.uint8, offset=length)
            return from_bytes(output["name"], output["datatype"], tuple(output["shape"]), raw)
        except (ValueError, LookupError, TypeError, RecursionError, RequestError) as error:
            raise InputError(f"an answer that cannot be read: {clip(str(error))}") from error
