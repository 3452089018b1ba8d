"""Who may reach the server and who may use it: the address rule, the token, TLS."""

from __future__ import annotations

import hmac
import ipaddress
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from mha_deploy.errors import InputError

TOKEN_VARIABLE = "MHA_DEPLOY_TOKEN"
LOOPBACK = "127.0.0.1"
# A longer token would be beyond what is taken of a header.
_TOKEN_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files. With `client_ca`, only clients with a certificate that it signed are let in."""

    cert: str = ""
    key: str = ""
    client_ca: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise InputError("TLS needs both a certificate and its key (--tls-cert and --tls-key)")
        if self.client_ca and not self.cert:
            raise InputError(
                "--tls-client-ca asks for client certificates; it needs --tls-cert and --tls-key"
            )

    def __bool__(self) -> bool:
        return bool(self.cert)

    def context(self) -> ssl.SSLContext:
        """A server's context, TLS 1.2 or newer.

        Raises:
            InputError: a file that cannot be read or is no PEM certificate or key.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        at_fault = ""
        try:
            for file in filter(None, (self.cert, self.key, self.client_ca)):  # OpenSSL names none
                at_fault = f"TLS file {file}"
                Path(file).open("rb").close()
            at_fault = f"TLS files {self.cert}, {self.key}"
            context.load_cert_chain(self.cert, self.key, password=_no_password)
            if self.client_ca:
                at_fault = f"TLS client CA {self.client_ca}"
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:  # ssl.SSLError is one
            raise InputError(f"{at_fault}: {error.strerror or error}") from error
        return context

    def read(self) -> tuple[bytes, bytes, bytes]:
        """The files' contents: certificate, key, client CA (empty where there is none).

        Raises:
            InputError: a file that cannot be read.
        """
        try:
            cert, key = Path(self.cert).read_bytes(), Path(self.key).read_bytes()
            return cert, key, Path(self.client_ca).read_bytes() if self.client_ca else b""
        except OSError as error:
            raise InputError(f"TLS file {error.filename}: {error.strerror}") from error


NO_TLS = Tls()


def _no_password() -> str:
    raise InputError("the TLS key is encrypted; give one without a passphrase")


def read_token(file: str = "") -> str:
    """The token from `file`, else from the environment (MHA_DEPLOY_TOKEN); "" where there is neither.

    Never from the command line, where other users of the machine could read it.

    Raises:
        InputError: the file cannot be read or holds more than 4 KiB, or the token is empty or cannot stand
            in a header.
    """
    if file:
        where = f"the token file {file}"
        try:
            with Path(file).open("rb") as handle:
                token = handle.read(_TOKEN_BYTES + 1).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {where}: {error}") from error
    elif TOKEN_VARIABLE in os.environ:
        where, token = f"the variable {TOKEN_VARIABLE}", os.environ[TOKEN_VARIABLE]
    else:
        return ""
    if len(token) > _TOKEN_BYTES:
        raise InputError(f"{where} holds more than a token; expected at most {_TOKEN_BYTES} bytes")
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(f"{where} holds no usable token; expected printable ASCII without spaces")
    return token


def check_address(host: str, token: str, *, insecure: bool) -> None:
    """Refuse to listen where others can reach the server without a token.

    Raises:
        InputError: `host` is not loopback, and there is neither a token nor the word that this is meant.
    """
    if not (is_loopback(host) or token or insecure):
        raise InputError(
            f"{host} can be reached from other machines; give a token (--token-file FILE or the variable "
            f"{TOKEN_VARIABLE}), or --insecure to serve whoever comes"
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def authorized(header: str, token: str) -> bool:
    """Whether an Authorization header carries `token`, in a time that does not depend on how much fits."""
    scheme, _, given = header.partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    return not token or (scheme.lower() == "bearer" and same)
