"""serve() with certificates."""

import shutil
import subprocess
from pathlib import Path

import pytest
from aiohttp import ClientSession

from tests.http.fake_engine import FakeEngine
from tests.http.serving import serving
from xylite.errors import ConfigError


async def test_bad_certificates_are_clear_errors(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("no certificate")
    present, absent = str(tmp_path / "c"), str(tmp_path / "none")
    for config, message in (
        ({"ssl_keyfile": "k"}, "ssl_keyfile needs ssl_certfile"),
        ({"ssl_certfile": present}, f"ssl_certfile {present}: it and its key .* must be PEM"),
        ({"ssl_certfile": absent}, f"ssl_certfile {absent}: cannot be read: No such file"),
        (
            {"ssl_certfile": present, "ssl_keyfile": absent},
            f"ssl_keyfile {absent}: cannot be read: No such file",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^{message}") as raised:
            async with serving(FakeEngine(), **config):
                pass
        assert "Errno" not in str(raised.value)


needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="nothing makes a certificate here"
)


def make_certificate(tmp_path: Path, *options: str) -> tuple[str, str]:
    """Files of a key and of a certificate."""
    key, certificate = str(tmp_path / "key"), str(tmp_path / "cert")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        + [*options, "-subj", "/CN=localhost", "-keyout", key, "-out", certificate],
        capture_output=True,
        check=True,
    )
    return key, certificate


@needs_openssl
@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_certfile"])
async def test_an_encrypted_key_is_a_clear_error_and_nobody_is_asked_for_the_pass_phrase(
    tmp_path: Path, name: str
) -> None:
    key, certificate = make_certificate(tmp_path, "-passout", "pass:secret")
    config = {"ssl_certfile": certificate, "ssl_keyfile": key}
    if name == "ssl_certfile":
        both = tmp_path / "both"
        both.write_text(Path(key).read_text() + Path(certificate).read_text())
        config = {"ssl_certfile": str(both)}
    with pytest.raises(ConfigError, match=f"^{name} {config[name]}: the key is encrypted") as e:
        async with serving(FakeEngine(), **config):
            pass
    assert e.value.param == name


@needs_openssl
async def test_tls(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "-nodes")
    config = {"ssl_keyfile": files[0], "ssl_certfile": files[1]}
    async with serving(FakeEngine(), **config) as (url, _), ClientSession() as client:
        assert url.startswith("https://127.0.0.1:")
        response = await client.get(url + "/v1/models", ssl=False)
        assert response.status == 200
