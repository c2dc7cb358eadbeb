"""From settings to destinations, with the secrets that the settings name.

Secrets are read once, when a dispatcher starts: what cannot be read is said then. Called by the
wiring, and by what judges an installation before it is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.dispatcher.alerts.mail import Mail
from penstock.dispatcher.alerts.reading import is_http
from penstock.dispatcher.alerts.rules import AlertSettings, SecretPlace
from penstock.dispatcher.alerts.telling import Destination
from penstock.dispatcher.alerts.webhook import Webhook
from penstock.kernel.errors import InvalidInput

SECRET_BYTES_MAX: Final = 10_000


def destinations_of(
    settings: AlertSettings, *, environment: Mapping[str, str]
) -> tuple[Destination, ...]:
    """Where notices go; raises `InvalidInput` if a secret is not where the settings say."""
    found: list[Destination] = []
    url = settings.webhook or _secret("webhook", settings.webhook_place, environment)
    if url:
        if not is_http(url):
            raise InvalidInput(
                "What alerts.webhook names is not an http URL.", hint="It is https://HOST/PATH."
            )
        secret = _secret("webhook_secret", settings.webhook_secret, environment)
        found.append(Webhook(url, secret=secret))
    if settings.mail is not None:
        password = _secret("mail.password", settings.mail.password, environment)
        found.append(Mail(settings.mail, password=password))
    return tuple(found)


def _secret(name: str, place: SecretPlace | None, environment: Mapping[str, str]) -> str:
    if place is None:
        return ""
    if place.variable:
        value = environment.get(place.variable, "").strip()
        where = f"the variable {place.variable}"
    else:
        value = _in_file(name, place.file)
        where = place.file
    if not value:
        raise InvalidInput(f"alerts.{name} is to be in {where}, which is empty or not there.")
    return value


def _in_file(name: str, file: str) -> str:
    try:
        with Path(file).open("rb") as opened:
            content = opened.read(SECRET_BYTES_MAX + 1)
        if len(content) > SECRET_BYTES_MAX:
            raise InvalidInput(f"alerts.{name}: {file} is too long for a secret.")
        return content.decode("utf-8").strip()
    except OSError as error:
        raise InvalidInput(
            f"alerts.{name} cannot be read from {file}: {error.strerror or error}."
        ) from error
    except UnicodeDecodeError:
        raise InvalidInput(f"alerts.{name}: {file} is not a text.") from None
