"""What the child processes of users' code have in their environment, and what they have not.

A child has the environment of its worker, less everything that proves who the worker is: what is
Penstock's own, and what AWS's tools find credentials by. The tools are also kept from looking
elsewhere by themselves: in the home folder of the worker, and at the machine's own role. What a
task may have instead is set for the time of the task (`penstock.runtimes.handed`).

Untrusted work has what a program needs to run, and nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

_SECRET: Final = re.compile(
    r"PENSTOCK_.*"
    r"|AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|SECURITY_TOKEN|CREDENTIAL_EXPIRATION"
    r"|(DEFAULT_)?PROFILE|SHARED_CREDENTIALS_FILE|CREDENTIAL_FILE|CONFIG_FILE|CONTAINER_.*"
    r"|WEB_IDENTITY_TOKEN_FILE|ROLE_ARN|ROLE_SESSION_NAME)"
)
_ELSEWHERE: Final = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
_HARMLESS: Final = re.compile(
    r"PATH|LANG|LANGUAGE|LC_[A-Z]+|TZ|LD_LIBRARY_PATH|PYTHON(PATH|HASHSEED|UTF8|DONTWRITEBYTECODE)"
    r"|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|AWS_CA_BUNDLE"
    r"|AWS_(DEFAULT_)?REGION|AWS_ENDPOINT_URL(_[A-Z0-9_]+)?|AWS_EC2_METADATA_DISABLED"
    r"|AWS_CONFIG_FILE|AWS_SHARED_CREDENTIALS_FILE"
    r"|OMP_NUM_THREADS|OPENBLAS_NUM_THREADS|MKL_NUM_THREADS"
)


def of_children(ours: Mapping[str, str], search_path: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of children, from that of this process."""
    kept = {name: value for name, value in ours.items() if not _SECRET.fullmatch(name.upper())}
    return {**kept, **_ELSEWHERE, **search_path}


def of_untrusted(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Of the environment of children, what untrusted work has."""
    return {name: value for name, value in environment.items() if _HARMLESS.fullmatch(name)}
