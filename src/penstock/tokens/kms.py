"""Signs with a key of AWS KMS: one of `ECC_NIST_P256` for `SIGN_VERIFY`, which never leaves KMS.

    signer = await KmsSigner.open("alias/penstock", aws=aws, clock=clock)

`open` asks KMS for the public half, once. What signs from then on is the key that was found, by its
ARN: an alias that is moved changes nothing for a signer that is open. One token is one request,
`Sign` with the SHA-256 of the message (`MessageType=DIGEST`), whose DER is translated. Whatever KMS
answers is verified here before it is given away: a signature that nobody can verify is a failure.

A call takes `seconds_max` at most. After a failure all calls fail at once with the same words for
`QUIET_SECONDS`, so that an outage costs its bound once and not for every task. Requests are made in
threads of the signer's own: one that is given up goes on in its thread for as long as its sockets
may wait, and no longer. Signing changes nothing in KMS, so it may be repeated.

The IAM policy needs `kms:GetPublicKey` and `kms:Sign` on the key. The package boto3 is asked for
when a signer is opened.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_der_public_key

from penstock.kernel.aws import Aws, aws_client, error_code
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import InvalidInput, SignerUnavailable
from penstock.tokens.signer import PublicKey, is_signed, jwk_of, raw_of_der

CALL_SECONDS_MAX: Final = 3.0
QUIET_SECONDS: Final = 1.0

_CONNECT_SECONDS_MAX: Final = 1.0
_READ_SECONDS_MAX: Final = 2.0
_TRIES_MAX: Final = 2
_THREADS_MAX: Final = 16
_KEY_SPEC: Final = "ECC_NIST_P256"
_KEY_USAGE: Final = "SIGN_VERIFY"
# Answers after which another try would find the same.
_WRONG_KEY: Final = frozenset(
    {"NotFoundException", "InvalidArnException", "UnsupportedOperationException"}
    | {"InvalidKeyUsageException", "ValidationException"}
)
_MAKE: Final = "Make one with: aws kms create-key --key-spec ECC_NIST_P256 --key-usage SIGN_VERIFY"

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    until: float


class KmsSigner:
    """One key of KMS."""

    def __init__(self, calls: _Calls, *, arn: str, key: PublicKey) -> None:
        self._calls = calls
        self._arn = arn
        self._key = key
        self._jwk = jwk_of(key)

    def __repr__(self) -> str:
        return f"KmsSigner({self._arn!r})"

    @classmethod
    async def open(
        cls,
        key: str,
        *,
        aws: Aws,
        clock: Clock | None = None,
        seconds_max: float = CALL_SECONDS_MAX,
        make_client: Callable[[], Any] | None = None,
    ) -> Self:
        """The signer of a key, which is an id, an ARN or an alias.

        Raises `InvalidInput` if that cannot be a key for tokens, and `SignerUnavailable`.
        """
        calls = _Calls(
            make_client or (lambda: _client(aws)),
            clock=clock or SystemClock(),
            seconds_max=seconds_max,
        )
        try:
            answer = await calls.call(
                lambda client: client.get_public_key(KeyId=key), is_opening=True
            )
            return cls(calls, arn=str(answer["KeyId"]), key=_public_key(answer, key))
        except BaseException:
            await calls.close()
            raise

    async def close(self) -> None:
        """Nothing can be signed afterwards."""
        await self._calls.close()

    @property
    def arn(self) -> str:
        """The key itself, whatever it was called by."""
        return self._arn

    @property
    def kid(self) -> str:
        return self._jwk["kid"]

    @property
    def jwk(self) -> Mapping[str, str]:
        return dict(self._jwk)

    async def sign(self, message: bytes) -> bytes:
        digest = hashlib.sha256(message).digest()

        def ask(client: Any) -> bytes:
            answer = client.sign(
                KeyId=self._arn,
                Message=digest,
                MessageType="DIGEST",
                SigningAlgorithm="ECDSA_SHA_256",
            )
            signature = raw_of_der(bytes(answer["Signature"]))
            if not is_signed(message, signature=signature, key=self._key):
                raise ValueError("the signature is not one of the message by the key")
            return signature

        return await self._calls.call(ask)


class _Calls:
    """Calls of KMS, in threads, each with a bound; a failure is remembered for a moment."""

    def __init__(self, make_client: Callable[[], Any], *, clock: Clock, seconds_max: float) -> None:
        self._make_client = make_client
        self._clock = clock
        self._seconds_max = seconds_max
        self._threads = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="penstock-kms")
        self._client: Any = None
        self._opening = asyncio.Lock()
        self._failure: _Failure | None = None

    async def call(self, ask: Callable[[Any], Answer], *, is_opening: bool = False) -> Answer:
        """What KMS answers. Only who opens a key is told that it is wrong: later it was right."""
        failure = self._failure
        if failure is not None and self._clock.monotonic() < failure.until:
            raise SignerUnavailable(failure.message, hint="Ask again.")
        try:
            async with asyncio.timeout(self._seconds_max):
                answer = await self._asked(ask)
        except InvalidInput:
            raise
        except TimeoutError:
            raise self._failed(f"timeout: no answer within {self._seconds_max:g} s") from None
        except Exception as error:
            code = error_code(error)
            if is_opening and code in _WRONG_KEY:
                raise InvalidInput(
                    f"KMS has no such key for tokens: {code}.", hint=_MAKE
                ) from error
            raise self._failed(code or str(error).rstrip(".") or type(error).__name__) from error
        self._failure = None
        return answer

    async def close(self) -> None:
        # Without waiting, and without cancelling: that would look like a cancelled caller.
        self._threads.shutdown(wait=False)
        client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(client.close)

    async def _asked(self, ask: Callable[[Any], Answer]) -> Answer:
        loop = asyncio.get_running_loop()
        if self._client is None:
            async with self._opening:
                if self._client is None:
                    self._client = await loop.run_in_executor(self._threads, self._make_client)
        return await loop.run_in_executor(self._threads, ask, self._client)

    def _failed(self, why: str) -> SignerUnavailable:
        message = f"KMS cannot sign now: {why}."
        self._failure = _Failure(message, self._clock.monotonic() + QUIET_SECONDS)
        return SignerUnavailable(message, hint="Ask again.")


def _client(aws: Aws) -> Any:
    return aws_client(
        "kms",
        aws=aws,
        read_seconds_max=_READ_SECONDS_MAX,
        connections_max=_THREADS_MAX,
        connect_seconds_max=_CONNECT_SECONDS_MAX,
        tries_max=_TRIES_MAX,
    )


def _public_key(answer: Mapping[str, Any], name: str) -> PublicKey:
    spec, usage = answer.get("KeySpec"), answer.get("KeyUsage")
    if spec != _KEY_SPEC or usage != _KEY_USAGE:
        raise InvalidInput(
            f"The KMS key {name} is one of {spec} for {usage}; tokens need {_KEY_SPEC} for"
            f" {_KEY_USAGE}.",
            hint=_MAKE,
        )
    try:
        key = load_der_public_key(bytes(answer["PublicKey"]))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidInput(f"The public half of the KMS key {name} cannot be read.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InvalidInput(f"The KMS key {name} is not one of P-256.", hint=_MAKE)
    return key
