"""What an s3:// URL and the AWS settings come to, and what is refused in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.store.s3.config import S3Config, s3_config
from penstock.store.s3.signing import Credentials
from penstock.store.s3.transport import S3Endpoint

KEYS = Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI")
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
NOWHERE = {"AWS_CONFIG_FILE": "/nonexistent/config"}


def config(url: str, environment: Mapping[str, str] = NOWHERE) -> S3Config:
    return s3_config(url, environment={**NOWHERE, **environment}, credentials=KEYS)


def refusal(url: str, environment: Mapping[str, str] = NOWHERE) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        config(url, environment)
    assert caught.value.message.endswith(".")
    return caught.value


def test_amazon_is_the_default() -> None:
    found = config("s3://bucket")
    assert found.endpoint == S3Endpoint("bucket.s3.us-east-1.amazonaws.com", 443, True, "us-east-1")
    assert (found.root, found.path_style) == ("", False)
    assert (found.path(None), found.path("a/b")) == ("/", "/a/b")
    assert found.where == "The S3 server at https://bucket.s3.us-east-1.amazonaws.com"


def test_china_has_its_own_domain() -> None:
    found = config("s3://bucket?region=cn-north-1")
    assert found.endpoint.host == "bucket.s3.cn-north-1.amazonaws.com.cn"


@pytest.mark.parametrize("url", ["s3://b.u.c", "s3://b.u.c/"])
def test_a_dotted_bucket_goes_into_the_path(url: str) -> None:
    # Amazon's certificate holds for one name before the domain, not for several.
    found = config(url)
    assert found.endpoint.host == "s3.us-east-1.amazonaws.com"
    assert (found.path(None), found.path("k")) == ("/b.u.c", "/b.u.c/k")


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("s3://bucket/", ""),
        ("s3://bucket//", ""),
        ("s3://bucket/a", "a/"),
        ("s3://bucket/a/b/", "a/b/"),
        ("s3://bucket/a%20b", "a%20b/"),
        ("s3://bucket/me@home", "me@home/"),
    ],
)
def test_a_prefix_is_taken_as_it_is(url: str, root: str) -> None:
    assert config(url).root == root


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "header"),
    [
        ("http://localhost", "localhost", 80, False, "localhost"),
        ("http://localhost/", "localhost", 80, False, "localhost"),
        ("http://localhost:9000/", "localhost", 9000, False, "localhost:9000"),
        ("https://s3.example", "s3.example", 443, True, "s3.example"),
        ("https://S3.example:443", "s3.example", 443, True, "s3.example"),
        ("https://s3.example:80", "s3.example", 80, True, "s3.example:80"),
        ("http://127.0.0.1:8333", "127.0.0.1", 8333, False, "127.0.0.1:8333"),
        ("http://[::1]", "::1", 80, False, "[::1]"),
        ("http://[::1]:8333", "::1", 8333, False, "[::1]:8333"),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(
    url: str, host: str, port: int, tls: bool, header: str
) -> None:
    for found in (
        config(f"s3://bucket?endpoint={url}"),
        config("s3://bucket", {"AWS_ENDPOINT_URL": url}),
    ):
        assert found.endpoint == S3Endpoint(host, port, tls, "us-east-1")
        assert found.endpoint.host_header == header
        assert found.path("k") == "/bucket/k"


def test_virtual_style_puts_the_bucket_before_the_host() -> None:
    found = config("s3://bucket?endpoint=http://s3.example:9000&style=virtual")
    assert found.endpoint.host_header == "bucket.s3.example:9000"
    assert found.path("k") == "/k"


def test_path_style_can_be_asked_for() -> None:
    found = config("s3://bucket?style=path&region=eu-west-1")
    assert found.endpoint.host == "s3.eu-west-1.amazonaws.com"
    assert found.path("k") == "/bucket/k"


@pytest.mark.parametrize(
    ("url", "by_copy"),
    [
        ("s3://bucket", True),
        ("s3://bucket?region=cn-north-1", True),
        ("s3://bucket?touch=swap", False),
        ("s3://bucket?endpoint=http://host", False),
        ("s3://bucket?endpoint=http://host&touch=copy", True),
        ("s3://bucket?endpoint=https://s3.eu-west-1.amazonaws.com", True),
        ("s3://bucket?endpoint=https://amazonaws.com.example", False),
    ],
)
def test_a_touch_is_a_copy_only_where_copies_are_known_to_be_atomic(
    url: str, by_copy: bool
) -> None:
    assert config(url).touch_by_copy is by_copy


def test_the_endpoint_for_s3_comes_before_the_general_one() -> None:
    environment = {"AWS_ENDPOINT_URL": "http://all:1", "AWS_ENDPOINT_URL_S3": "http://s3:2"}
    assert config("s3://bucket", environment).endpoint.host == "s3"
    assert config("s3://bucket?endpoint=http://url:3", environment).endpoint.host == "url"


@pytest.mark.parametrize(
    ("url", "environment", "region"),
    [
        ("s3://bucket?region=a-1", {"AWS_REGION": "b-2"}, "a-1"),
        ("s3://bucket", {"AWS_REGION": "b-2", "AWS_DEFAULT_REGION": "c-3"}, "b-2"),
        ("s3://bucket", {"AWS_REGION": "", "AWS_DEFAULT_REGION": "c-3"}, "c-3"),
        ("s3://bucket", {}, "d-4"),
        ("s3://bucket", {"AWS_PROFILE": ""}, "d-4"),
        ("s3://bucket", {"AWS_PROFILE": "work"}, "e-5"),
        ("s3://bucket", {"AWS_PROFILE": "bare"}, "us-east-1"),
        ("s3://bucket", {"AWS_PROFILE": "unknown"}, "us-east-1"),
    ],
)
def test_the_region_comes_from_where_aws_tools_take_it(
    url: str, environment: Mapping[str, str], region: str, tmp_path: Path
) -> None:
    settings = tmp_path / "config"
    settings.write_text(
        "[default]\nregion = d-4\noutput = json\noutput = text\n\n"
        "[profile work]\nregion=e-5\ns3 =\n  max_concurrent_requests = 20\n\n"
        "[profile bare]\nregion\n"
    )
    found = config(url, {"AWS_CONFIG_FILE": str(settings), **environment})
    assert found.endpoint.region == region


@pytest.mark.parametrize("content", [b"region = lost\n", b"\xff\xfe\x00", b"[default\n"])
def test_a_broken_settings_file_is_as_good_as_none(content: bytes, tmp_path: Path) -> None:
    settings = tmp_path / "config"
    settings.write_bytes(content)
    assert config("s3://b-1", {"AWS_CONFIG_FILE": str(settings)}).endpoint.region == "us-east-1"
    assert config("s3://b-1", {"AWS_CONFIG_FILE": str(tmp_path)}).endpoint.region == "us-east-1"


def test_the_ca_bundle_is_for_tls_only() -> None:
    environment = {"AWS_CA_BUNDLE": "/ca.pem"}
    assert config("s3://bucket", environment).endpoint.ca_bundle == "/ca.pem"
    assert config("s3://bucket?endpoint=http://h", environment).endpoint.ca_bundle == ""


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIDEXAMPLE:{SECRET}@bucket",
        f"s3://AKIDEXAMPLE:{SECRET}@bucket/prefix",
        f"s3://AKIDEXAMPLE:{SECRET[:9]}/{SECRET[9:]}@bucket",
        f"s3://AKIDEXAMPLE:{SECRET}",
        f"s3://{SECRET}@bucket",
        f"s3://bucket?secret_access_key={SECRET}",
        f"s3://bucket?{SECRET}",
        f"s3://bucket?style={'path'}&{SECRET}=",
        f"s3://bucket?endpoint=http://AKIDEXAMPLE:{SECRET}@host",
        f"s3://bucket?endpoint=http://host/?key={SECRET}",
        f"s3://bucket?endpoint=AKIDEXAMPLE:{SECRET}@host",
        f"s3://bucket#{SECRET}",
        f"s3://[{SECRET}",
    ],
)
def test_a_secret_in_the_url_is_refused_and_not_repeated(url: str) -> None:
    error = refusal(url)
    said = f"{error!r} {error} {error.hint}"
    for piece in (SECRET, SECRET[:9], SECRET[9:]):
        assert piece not in said


def test_a_secret_in_the_environments_endpoint_is_not_repeated() -> None:
    error = refusal("s3://bucket", {"AWS_ENDPOINT_URL": f"http://key:{SECRET}@host"})
    assert SECRET not in f"{error} {error.hint}"
    assert "Credentials" in error.message


def test_credentials_do_not_show_themselves() -> None:
    shown = repr(Credentials("AKIDEXAMPLE", SECRET, session_token=SECRET))
    assert "AKIDEXAMPLE" in shown
    assert SECRET not in shown


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "'' is not a bucket name"),
        ("s3:///prefix", "'' is not a bucket name"),
        ("s3://ab", "'ab' is not a bucket name"),
        ("s3://Bucket", "'Bucket' is not a bucket name"),
        ("s3://buck..et", "is not a bucket name"),
        ("s3://-bucket", "is not a bucket name"),
        ("s3://bucket-", "is not a bucket name"),
        ("s3://" + "b" * 64, "is not a bucket name"),
        ("s3://bucket:9000", "A ':' cannot be part of the bucket"),
        ("s3://bucket/a//b", "The prefix 'a//b' must not contain an empty part"),
        ("s3://bucket/a/../b", "The prefix"),
        ("s3://bucket/.penstock", "The prefix"),
        ("s3://bucket/a#b", "A '#'"),
        ("s3://bucket?regoin=x", "'regoin' is not an option"),
        ("s3://bucket?region=a&region=b", "'region' is there twice"),
        ("s3://bucket?region=a/b", "'a/b' is not the name of a region"),
        ("s3://bucket?touch=move", "The touch 'move' must be 'copy' or 'swap'"),
        ("s3://bucket?style=host", "The style 'host' must be 'path' or 'virtual'"),
        ("s3://bucket?endpoint=localhost:9000", "The endpoint must be"),
        ("s3://bucket?endpoint=ftp://host", "The endpoint must be"),
        ("s3://bucket?endpoint=http://", "The endpoint must be"),
        ("s3://bucket?endpoint=http://host/path", "The endpoint must be"),
        ("s3://bucket?endpoint=http://host:port", "The endpoint must be"),
        ("s3://bucket?endpoint=http://host:0", "The endpoint must be"),
        ("s3://bucket?endpoint=http://host:99999", "The endpoint must be"),
        ("s3://bucket?endpoint=http://[::1", "The endpoint must be"),
        ("s3://bucket?endpoint=http://ho st", "The endpoint must be"),
        ("s3://bucket?endpoint=http://[::1]:9000&style=virtual", "style=virtual"),
        ("s3://bucket?endpoint=http://127.0.0.1&style=virtual", "style=virtual"),
    ],
)
def test_what_is_wrong_is_said(url: str, words: str) -> None:
    assert words in refusal(url).message
