"""Tokens and TLS, over HTTP and gRPC."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from importlib import resources

import numpy as np
import pytest
from serving import ask, fake_runner, free_port, get, http, infer_request, serving, until

from mha_deploy.errors import InputError
from mha_deploy.serving import Tls
from mha_deploy.serving.security import authorized, check_address

tritongrpc = pytest.importorskip("tritonclient.grpc")
TOKEN = "s3cret-t0ken"
X = np.ones((1, 4, 32), np.float32)


@pytest.fixture(scope="module")
def server():
    with serving(fake_runner(), token=TOKEN, grpc_port=free_port()) as running:
        yield running


@pytest.mark.parametrize(
    "path", ["/v2", "/metrics", "/live.json", "/v2/models/small", "/v2/models/small/stats"]
)
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"]
)
def test_without_the_token_nothing_is_told(server, path, header):
    given = {} if header is None else {"authorization": header}
    reply = get(server.port, path, **given)
    assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert list(reply.json) == ["error"]


def test_infer_without_the_token_is_refused_and_counted(server):
    before = server.stats.outcomes["refused"]
    assert ask(server.port, infer_request(X)).status == 401
    assert ask(server.port, infer_request(X, headers={"authorization": f"bearer {TOKEN}"})).status == 200
    until(lambda: server.stats.outcomes["refused"] == before + 1)


def test_probes_and_the_page_need_no_token_and_tell_nothing(server):
    assert get(server.port, "/v2/health/live").json == {"live": True}
    assert get(server.port, "/v2/health/ready").json == {"ready": True}
    page = get(server.port, "/")
    assert page.status == 200
    assert page.body == resources.files("mha_deploy.serving").joinpath("page.html").read_bytes()
    assert "default-src 'none'" in page.headers["content-security-policy"]


@pytest.mark.parametrize("rest", ["", "/config", "/versions/1", "/infer", "/nothing"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_who_has_no_token_cannot_tell_the_models_name_from_another(server, method, rest):
    named = [ask(server.port, http(method, f"/v2/models/{name}{rest}")) for name in ("small", "other")]
    assert named[0].status == named[1].status
    assert named[0].body == named[1].body


def test_without_the_token_a_repository_tells_no_name_either(server):
    path = "/v2/repository/models/{}/load"
    named = [ask(server.port, http("POST", path.format(name))) for name in ("small", "other")]
    assert [reply.status for reply in named] == [401, 401]


def test_grpc_wants_the_same_token(server):
    with tritongrpc.InferenceServerClient(f"127.0.0.1:{server.server.grpc_port}") as client:
        assert client.is_server_live()
        with pytest.raises(Exception, match="wants a token"):
            client.get_server_metadata()
        x = tritongrpc.InferInput("x", list(X.shape), "FP32")
        x.set_data_from_numpy(X)
        with pytest.raises(Exception, match="wants a token"):
            client.infer("small", [x])
        headers = {"authorization": f"Bearer {TOKEN}"}
        assert client.get_server_metadata(headers=headers).name == "mha-deploy"
        assert client.infer("small", [x], headers=headers).as_numpy("y").shape == X.shape


def test_a_token_is_compared_whole():
    assert authorized(f"Bearer {TOKEN}", TOKEN)
    assert not authorized("Bearer \udcff", TOKEN)
    assert not authorized("", TOKEN)
    assert authorized("", "")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(host):
    check_address(host, "", insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_another_address_needs_a_token_or_the_word(host):
    with pytest.raises(InputError, match="can be reached from other machines"):
        check_address(host, "", insecure=False)
    check_address(host, TOKEN, insecure=False)
    check_address(host, "", insecure=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A certificate for localhost and one of a client, each its own authority."""
    if not shutil.which("openssl"):
        pytest.skip("openssl, which makes the test's certificates, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "client"):
        command = (
            f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name} "
        )
        command += f"-keyout {name}.key -out {name}.pem -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


def secure_get(port, path, context):
    from urllib.request import urlopen

    with urlopen(f"https://localhost:{port}{path}", context=context, timeout=10) as reply:
        return reply.status


def test_tls_serves_http_and_grpc(certificates):
    tls = Tls(str(certificates / "server.pem"), str(certificates / "server.key"))
    trusting = ssl.create_default_context(cafile=certificates / "server.pem")
    with serving(fake_runner(), tls=tls, grpc_port=free_port()) as running:
        assert secure_get(running.port, "/v2", trusting) == 200
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            secure_get(running.port, "/v2", ssl.create_default_context())
        assert ask(running.port, http("GET", "/v2")) is None  # plain text on a TLS port
        old = ssl.create_default_context(cafile=certificates / "server.pem")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(OSError, match=r"SSL|no protocols"):
            secure_get(running.port, "/v2", old)
        address = f"localhost:{running.server.grpc_port}"
        root = str(certificates / "server.pem")
        with tritongrpc.InferenceServerClient(address, ssl=True, root_certificates=root) as client:
            assert client.is_server_ready()


def test_with_a_client_authority_only_its_clients_come_in(certificates):
    names = ("server.pem", "server.key", "client.pem")
    tls = Tls(*(str(certificates / name) for name in names))
    stranger = ssl.create_default_context(cafile=certificates / "server.pem")
    known = ssl.create_default_context(cafile=certificates / "server.pem")
    known.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    with serving(fake_runner(), tls=tls) as running:
        assert secure_get(running.port, "/v2", known) == 200
        with pytest.raises(OSError, match=r"CERTIFICATE_REQUIRED|alert|reset|closed|EOF"):
            secure_get(running.port, "/v2", stranger)


def test_a_file_that_is_no_certificate_is_told(certificates):
    cert, key = str(certificates / "server.pem"), str(certificates / "server.key")
    with pytest.raises(InputError, match=f"TLS files {key}, {key}: "):
        Tls(key, key).context()
    with pytest.raises(InputError, match=f"TLS client CA {key}: "):
        Tls(cert, key, key).context()
    with pytest.raises(InputError, match=r"TLS file none\.pem: No such file"):
        Tls(cert, key, "none.pem").context()
