"""A server by its URL: who it is, and what it says of itself before it is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mha_deploy.errors import InputError
from mha_deploy.load.client import CONNECT_S, HttpTarget, reason_of, text_of
from mha_deploy.load.encoding import BinaryEncoding, model_path
from mha_deploy.load.inputs import BATCH, Inputs, check_lengths
from mha_deploy.serving.security import is_loopback
from mha_deploy.serving.wire import clip

_FORM = "http://HOST:PORT"
_RANGE = re.compile(r"(\d{1,10})\.\.(\d{1,10})", re.ASCII)
_SERVER = re.compile(r"[^/\s]+:\d+/?")


def address(url: str, *, allow_remote: bool = False) -> tuple[str, int]:
    """Host (as IDNA writes it) and port of a server's URL.

    Raises:
        InputError: it is no http URL, or names another machine than this without `allow_remote`.
    """
    try:
        parts = urlsplit(url)
        # What the system's resolver would refuse with a UnicodeError.
        host = (parts.hostname or "").encode("idna").decode("ascii")
        port = 80 if parts.port is None else parts.port
    except ValueError as error:
        raise InputError(f"{url!r}: {error}; expected {_FORM}") from error
    if parts.scheme == "https":
        raise InputError(f"{url!r}: load does not speak TLS; expected {_FORM}, a server without --tls-cert")
    if parts.scheme != "http" or not host or not port or "@" in parts.netloc:
        raise InputError(f"{url!r}; expected {_FORM}")
    if parts.path.strip("/") or "?" in url or "#" in url:
        raise InputError(f"{url!r}; expected {_FORM}, without a path or a query")
    if not (allow_remote or is_loopback(host)):
        raise InputError(
            f"{host} is another machine, and a load test can bring it down; --allow-remote if it is yours"
        )
    return host, port


def check_folder(name: str) -> None:
    """Tell who forgot a server's scheme, where there is no folder that the name could mean.

    Raises:
        InputError: `name` is no folder, and reads as HOST:PORT.
    """
    if _SERVER.fullmatch(name) and not Path(name).exists():
        raise InputError(f"there is no folder {name}; for a server, write http://{name}")


async def fetch(host: str, port: int, method: str, path: str, token: str = "") -> Any:
    """The JSON that one request gets.

    Raises:
        InputError: no server there, another status than 200, or no JSON.
    """
    credentials = f"Authorization: Bearer {token}\r\n" if token else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{credentials}Content-Length: 0\r\n"
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port)
            with contextlib.closing(writer):
                writer.write(f"{head}Connection: close\r\n\r\n".encode("latin-1"))
                answer = await reader.read()
    except OSError as error:
        raise InputError(f"no server answers at {host}:{port}: {reason_of(error)}") from error
    head_text, _, body = answer.partition(b"\r\n\r\n")
    status = head_text.decode("latin-1").partition("\r\n")[0]
    if " 200 " not in f"{status} ":
        raise InputError(f"{method} {path} at {host}:{port} gave {clip(status)} {clip(text_of(body))}")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{method} {path} at {host}:{port} gave no JSON: {clip(text_of(body))}") from error


def server_target(
    url: str,
    longest: int,
    *,
    shortest: int = 0,
    model: str = "",
    timeout_us: int = 0,
    token: str = "",
    allow_remote: bool = False,
    seed: int = 0,
) -> HttpTarget:
    """A server of the Open Inference Protocol, for lengths from `shortest`, if given, to `longest`.

    Without `model`, the only one that it has. Call it outside of an event loop.

    Raises:
        InputError: no such server or model, one whose inputs are not those of attention, or one whose
            configuration says that it takes other lengths.
    """
    host, port = address(url, allow_remote=allow_remote)
    model, metadata, config = asyncio.run(_described(host, port, model, token))
    check_lengths(shortest or longest, longest, _ranges(config))
    encoding = BinaryEncoding(model, timeout_us=timeout_us, token=token)
    inputs = Inputs.for_metadata(metadata, longest, seed)
    return HttpTarget(f"{model} at {url}", host, port, encoding, inputs)


async def _described(host: str, port: int, model: str, token: str) -> tuple[str, Any, Any]:
    """The model's name, metadata and configuration, which is None where the server gives none."""
    if not model:
        index = await fetch(host, port, "POST", "/v2/repository/index", token)
        if not isinstance(index, list):
            raise InputError(
                f"{host}:{port} gives {clip(index)} for its list of models; name the model with --model"
            )
        named = [each.get("name") for each in index if isinstance(each, dict)]
        names = [name for name in named if isinstance(name, str) and name]
        if len(names) != 1:
            raise InputError(
                f"{host}:{port} has models {', '.join(names) or 'none'}; choose one with --model"
            )
        model = names[0]
    metadata = await fetch(host, port, "GET", model_path(model), token)
    try:
        config = await fetch(host, port, "GET", f"{model_path(model)}/config", token)
    except InputError:  # it is an extension of the protocol
        config = None
    return model, metadata, config


def _ranges(config: Any) -> dict[str, tuple[int, int]]:
    """What each length axis takes, where the configuration has it: `serve` gives "1..64" by name."""
    try:
        given = {name: str(value["string_value"]) for name, value in config["parameters"].items()}
    except (AttributeError, LookupError, TypeError):
        return {}
    ranges = {name: _RANGE.fullmatch(text) for name, text in given.items() if name != BATCH}
    return {name: (int(found[1]), int(found[2])) for name, found in ranges.items() if found}
