"""serve: a bundle's artifact behind the Open Inference Protocol."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mha_deploy.cli.shared import (
    FOLDER,
    artifact_option,
    json_option,
    placement,
    placement_options,
    print_json,
)
from mha_deploy.staging import interrupts_held, stop_as_exception

if TYPE_CHECKING:
    from mha_deploy.serving import Server

PORT = click.IntRange(0, 65535)


@contextlib.contextmanager
def _may_stop() -> Iterator[None]:
    """SIGTERM before there is a loop to hear it: clean up, say so, and end as the signal would have it."""
    try:
        with stop_as_exception():
            yield
    except SystemExit:
        click.echo("stopped by SIGTERM before it was ready", err=True)
        raise


@click.command()
@click.argument("bundle", type=FOLDER)
@artifact_option
@placement_options
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Sessions at once; 0: measured.")
@click.option("--mode", type=click.Choice(["exact", "fast"]), default="exact", show_default=True)
@click.option(
    "--allow-batch-dependent",
    is_flag=True,
    help="Serve an artifact whose answers depend on what else is in their batch.",
)
@click.option("--queue-requests", type=click.IntRange(min=1), default=1024, show_default=True)
@click.option("--queue-tokens", type=click.IntRange(min=1), default=1 << 18, show_default=True)
@click.option("--queue-bytes", type=click.IntRange(min=1), default=1 << 30, show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=PORT, default=8000, show_default=True, help="0: one that is free.")
@click.option("--grpc-port", type=PORT, default=0, help="Also serve gRPC there; 0: no gRPC.")
@click.option("--token-file", default="", help="File with the token; else MHA_DEPLOY_TOKEN.")
@click.option("--insecure", is_flag=True, help="Allow another address than loopback without a token.")
@click.option("--tls-cert", default="", help="PEM certificate; turns TLS on.")
@click.option("--tls-key", default="", help="PEM key of the certificate.")
@click.option("--tls-client-ca", default="", help="PEM; only clients with its certificates come in.")
@click.option("--max-body-bytes", type=click.IntRange(min=1), default=64 << 20, show_default=True)
@click.option("--request-seconds", type=click.FloatRange(min=0.001), default=60.0, show_default=True)
@click.option("--grace", type=click.FloatRange(min=0), default=30.0, show_default=True, help="Seconds.")
@json_option
@_may_stop()
def serve(
    *,
    bundle: Path,
    artifact: str,
    workers: int,
    mode: str,
    allow_batch_dependent: bool,
    queue_requests: int,
    queue_tokens: int,
    queue_bytes: int,
    host: str,
    port: int,
    grpc_port: int,
    token_file: str,
    insecure: bool,
    tls_cert: str,
    tls_key: str,
    tls_client_ca: str,
    max_body_bytes: int,
    request_seconds: float,
    grace: float,
    as_json: bool,
    **where: Any,
) -> None:
    """Serve BUNDLE over HTTP (Open Inference Protocol v2), and over gRPC where asked.

    Runs until SIGTERM or Ctrl-C, then finishes what was accepted, for up to --grace seconds, and prints
    what became of all requests.
    """
    with interrupts_held():
        from mha_deploy.bundle import Bundle
        from mha_deploy.runner import RunnerOptions
        from mha_deploy.serving import Limits, ServeOptions, Tls, read_token
        from mha_deploy.serving import serve as run
        from mha_deploy.serving.server import warnings_of

    begin = time.perf_counter()
    options = ServeOptions(
        host=host,
        port=port,
        grpc_port=grpc_port,
        token=read_token(token_file),
        insecure=insecure,
        tls=Tls(tls_cert, tls_key, tls_client_ca),
        grace_s=grace,
        limits=Limits(body_bytes=max_body_bytes, request_s=request_seconds),
    )
    for warning in warnings_of(options):
        click.echo(f"warning: {warning}", err=True)

    def announce(server: Server) -> None:
        if options.grpc_port:
            click.echo(f"gRPC on {options.host}:{server.grpc_port}", err=True)
        ready_s = time.perf_counter() - begin
        click.echo(f"serving {server.model.name} at {server.url} (ready in {ready_s:.2f} s)", err=True)

    loaded, placed = Bundle.load(bundle), placement(**where)
    if not artifact and (passed_over := loaded.passed_over(placed)):
        click.echo(
            f"warning: `optimize` chose {', '.join(passed_over)}, but on another machine or with other "
            "versions, device or threads; the canonical artifact runs here: run `optimize` here, or name an "
            "--artifact",
            err=True,
        )
    report = run(
        loaded,
        artifact,
        placement=placed,
        runner_options=RunnerOptions(
            workers=workers,
            threads=where["threads"],
            max_queue_requests=queue_requests,
            max_queue_tokens=queue_tokens,
            max_queue_bytes=queue_bytes,
            mode=mode,
            allow_batch_dependent=allow_batch_dependent,
        ),
        options=options,
        announce=announce,
        last=True,
    )
    if as_json:
        print_json(report.to_json())
        return
    outcomes = ", ".join(f"{count} {name}" for name, count in report.outcomes.items() if count)
    click.echo(f"{report.received} requests" + (f": {outcomes}" if outcomes else ""))
