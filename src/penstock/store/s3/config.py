"""Where an `s3://` store is and with what it is signed, from the URL and the usual AWS settings.

    s3://BUCKET[/PREFIX][?endpoint=URL&region=NAME&style=path|virtual&touch=copy|swap
                          &deletes=conditional|tombstone]

What the URL does not say comes from where every AWS tool takes it: `AWS_ENDPOINT_URL_S3`,
`AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_DEFAULT_REGION`, the profile's region, `AWS_CA_BUNDLE`, and
for credentials the default chain: environment, profile, web identity, container, instance.

Secrets are never part of a URL. One that was pasted into it is refused, and no error here repeats
a URL, so that it does not reach a log either.
"""

from __future__ import annotations

import configparser
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

from penstock.kernel.errors import InvalidInput
from penstock.store.base import check_key
from penstock.store.s3.signing import Credentials, Keyring
from penstock.store.s3.transport import S3Endpoint

_OPTIONS: Final = ("endpoint", "region", "style", "touch", "deletes")
_OPTION: Final = re.compile(r"[a-z_-]{1,24}")
_BUCKET: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]|\.(?!\.)){1,61}[a-z0-9]")
_REGION: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOST: Final = re.compile(r"[a-z0-9](?:[a-z0-9_.-]*[a-z0-9])?")
_FORM: Final = "Write s3://BUCKET/PREFIX?endpoint=URL&region=NAME&style=path|virtual."
_KEYS_FORM: Final = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, instead."


@dataclass(frozen=True, slots=True)
class S3Config:
    """A prefix of a bucket, how to reach it and how to sign. `root` is empty or ends in '/'."""

    bucket: str
    root: str
    endpoint: S3Endpoint
    path_style: bool
    touch_by_copy: bool
    deletes: str
    """`conditional`, `tombstone`, or nothing: as the bucket's record says."""
    keyring: Keyring

    def path(self, key: str | None) -> str:
        """The URL path of a whole key, or of the bucket."""
        if self.path_style:
            return f"/{self.bucket}" if key is None else f"/{self.bucket}/{key}"
        return "/" if key is None else f"/{key}"

    @property
    def where(self) -> str:
        scheme = "https" if self.endpoint.tls else "http"
        return f"The S3 server at {scheme}://{self.endpoint.host_header}"

    @property
    def unreachable_hint(self) -> str:
        """What to look at when there is no connection."""
        if self.endpoint.tls:
            return (
                "Check that the server runs, that the endpoint is right, and that AWS_CA_BUNDLE"
                " names who signed its certificate if the system does not know them."
            )
        return "Check that the server runs and that the endpoint is right."


def s3_config(
    url: str, *, environment: Mapping[str, str], credentials: Credentials | None = None
) -> S3Config:
    """Read an `s3://` URL. Raises `InvalidInput` with what is wrong in it."""
    parts = _split(url)
    bucket = parts.netloc
    options = _options(parts.query)
    region = options.get("region") or _region(environment)
    if not _REGION.fullmatch(region):
        raise InvalidInput(f"{region!r} is not the name of a region.", hint=_FORM)
    endpoint_url = (
        options.get("endpoint")
        or environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or ""
    )
    style = options.get("style") or ("path" if endpoint_url or "." in bucket else "virtual")
    if style not in ("path", "virtual"):
        raise InvalidInput(f"The style {style!r} must be 'path' or 'virtual'.", hint=_FORM)
    path_style = style == "path"
    endpoint = _endpoint(
        endpoint_url or _amazon(region),
        region=region,
        bucket="" if path_style else bucket,
        ca_bundle=environment.get("AWS_CA_BUNDLE", ""),
    )
    touch = options.get("touch") or ("copy" if endpoint.is_amazon else "swap")
    if touch not in ("copy", "swap"):
        raise InvalidInput(f"The touch {touch!r} must be 'copy' or 'swap'.", hint=_FORM)
    deletes = options.get("deletes", "")
    if deletes not in ("", "conditional", "tombstone"):
        raise InvalidInput(
            f"The deletes {deletes!r} must be 'conditional' or 'tombstone'.", hint=_FORM
        )
    return S3Config(
        bucket=bucket,
        root=_root(parts.path),
        endpoint=endpoint,
        path_style=path_style,
        touch_by_copy=touch == "copy",
        deletes=deletes,
        keyring=Keyring(credentials or _in_environment(environment)),
    )


def _split(url: str) -> SplitResult:
    """The parts of the URL, of which the bucket is right."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidInput("The URL of the store cannot be read.", hint=_FORM) from error
    if "@" in parts.netloc or ("@" in parts.path and not _BUCKET.fullmatch(parts.netloc)):
        raise InvalidInput("Credentials do not go into the URL of a store.", hint=_KEYS_FORM)
    if ":" in parts.netloc:
        raise InvalidInput("A ':' cannot be part of the bucket in a store's URL.", hint=_FORM)
    if not _BUCKET.fullmatch(parts.netloc):
        raise InvalidInput(f"{parts.netloc!r} is not a bucket name.", hint=_FORM)
    if parts.fragment:
        raise InvalidInput("A '#' cannot be part of a store's URL.", hint=_FORM)
    return parts


def _options(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS:
            # What does not look like a name may be a secret that was pasted there.
            shown = repr(name) if _OPTION.fullmatch(name) else "What follows the '?'"
            raise InvalidInput(
                f"{shown} is not an option of an s3:// URL.",
                hint=f"The options are {', '.join(_OPTIONS)}.",
            )
        if name in options:
            raise InvalidInput(f"The option {name!r} is there twice.", hint=_FORM)
        options[name] = value
    return options


def _root(path: str) -> str:
    root = path.strip("/")
    if not root:
        return ""
    try:
        check_key(root)
    except InvalidInput as error:
        problem = error.message.replace("The key", "The prefix", 1)
        raise InvalidInput(problem, hint=_FORM) from error
    return f"{root}/"


def _amazon(region: str) -> str:
    return f"https://s3.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")


def _endpoint(url: str, *, region: str, bucket: str, ca_bundle: str) -> S3Endpoint:
    problem = InvalidInput(
        "The endpoint must be http://HOST[:PORT] or https://HOST[:PORT].",
        hint="It comes from ?endpoint= in the URL, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.",
    )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise problem from error
    if "@" in parts.netloc:
        raise InvalidInput("Credentials do not go into the URL of an endpoint.", hint=_KEYS_FORM)
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or port == 0:
        raise problem
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise problem
    if not _is_address(host) and not _HOST.fullmatch(host):
        raise problem
    if bucket and _is_address(host):
        raise InvalidInput(
            f"style=virtual puts the bucket before the host's name, and {host} is an address.",
            hint="Name the host, or use style=path.",
        )
    tls = parts.scheme == "https"
    return S3Endpoint(
        host=f"{bucket}.{host}" if bucket else host,
        port=port or (443 if tls else 80),
        tls=tls,
        region=region,
        ca_bundle=ca_bundle if tls else "",
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _region(environment: Mapping[str, str]) -> str:
    named = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    return named or _profile_region(environment) or "us-east-1"


def _profile_region(environment: Mapping[str, str]) -> str:
    profile = environment.get("AWS_PROFILE") or "default"
    path = Path(environment.get("AWS_CONFIG_FILE") or "~/.aws/config")
    settings = configparser.ConfigParser(
        interpolation=None, strict=False, allow_no_value=True, default_section=""
    )
    try:
        settings.read(path.expanduser(), encoding="utf-8")
    except (OSError, RuntimeError, ValueError, configparser.Error):
        return ""
    section = "default" if profile == "default" else f"profile {profile}"
    return settings.get(section, "region", fallback="") or ""


def _in_environment(environment: Mapping[str, str]) -> Credentials | None:
    """The keys in the environment given; the default chain looks into the process's own."""
    access_key = environment.get("AWS_ACCESS_KEY_ID")
    secret_key = environment.get("AWS_SECRET_ACCESS_KEY")
    if not access_key or not secret_key:
        return None
    return Credentials(access_key, secret_key, environment.get("AWS_SESSION_TOKEN") or None)
