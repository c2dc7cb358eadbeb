"""Every error that Penstock raises on purpose, drawn once.

```
PenstockError
├── InvalidInput            the caller's words are wrong: a URL, a key, a setting
├── StoreError              a request to an object store did not do what was asked
│   ├── NotFound            no object under that key
│   ├── AlreadyExists       a CREATE met an object
│   ├── VersionConflict     a condition on a version did not hold
│   │   └── Superseded      our write took effect and another has come over it since
│   ├── Throttled           the store asks for fewer requests; nothing was done
│   ├── Unavailable         no answer, and nothing was changed: repeating is safe
│   ├── OutcomeUnknown      a write whose answer is lost: done or not done
│   ├── Refused             the credentials are wrong or not allowed to do this
│   ├── BucketNotFound      the bucket, or the folder that should hold it, is not there
│   └── Unsupported         the store cannot keep a promise that Penstock needs
├── QueueNotFound           there is no such queue in the store
├── ScheduleNotFound        there is no such schedule in the queue
├── BatchNotFound           nothing is known of this batch
├── QueueDrained            the queue takes no more tasks, of this type or at all
├── WorkerIdConflict        the name of a worker is in use by another
│   └── WorkerLeaseLost     it was, or another took over, while this one ran
├── TaskError               a task is not there, or did not end as was hoped
│   ├── TaskNotFound        nothing is known of this task
│   ├── TaskFailed          it failed for good
│   ├── TaskCancelled       it was cancelled
│   ├── PayloadLost         its input or its result is gone or damaged
│   ├── KeyConflict         its key is taken by a task with another input
│   └── NotSettled          it has not ended yet; also a TimeoutError
├── WorkFailed              a runtime ran the work of a task, and it failed
│   └── WorkReleased        it was handed back, and has not failed
├── SecretUnavailable       a secret that a job names cannot be had
├── SchemaRefused           what was made does not fit the schema of its dataset
├── Damaged                 a file of a dataset is not what its manifest says
├── DispatcherError         a request to a dispatcher did not do what was asked
│   ├── DispatcherUnavailable   no answer, or not now: whether it was done is not known
│   └── DispatcherRefused   it answered no, and says why
├── TokenRefused            a capability token proves nothing here
├── SignerUnavailable       no token can be signed now
├── CredentialsRefused      no credentials can be minted for this token
├── CredentialsUnavailable  none can be minted now
├── DatabaseUnavailable     Postgres did not answer; whether it committed is not known
├── MigrationRefused        the database is not one that this release can bring forward
└── UnreadableObject        an object is not in a form that this release can read
    ├── NotOurs             not written by Penstock, or damaged
    └── NewerFormat         written by a later release
```

An error is a sentence for people and fields for programs. `hint`, where there is one, is the
next step. Errors of third parties are mapped to these once, in the adapter that met them.

What a user's function raises to say what follows: never again, or later.

They are no errors of Penstock's, and so stand outside of its tree.
"""

from __future__ import annotations

from typing import Final


class PenstockError(Exception):
    """The root; the command line prints it as one sentence and the hint."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def advice(self) -> str:
        """What is wrong and what to do, in one line of a log."""
        return f"{self.message} {self.hint}" if self.hint else self.message


class InvalidInput(PenstockError):
    """What the caller gave cannot be right, whatever the state of the world."""


class StoreError(PenstockError):
    """A request to an object store did not do what was asked."""

    def __init__(self, message: str, *, key: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


class NotFound(StoreError):
    """There is no object under this key."""


class AlreadyExists(StoreError):
    """A CREATE met an object that is already there."""


class VersionConflict(StoreError):
    """The object is not there in the version that the condition named."""


class Superseded(VersionConflict):
    """Our write took effect, and another writer has replaced it since."""


class Throttled(StoreError):
    """The store asked for fewer requests. The request was not carried out."""

    def __init__(
        self, message: str, *, key: str = "", hint: str = "", retry_after_seconds: float = 0.0
    ) -> None:
        super().__init__(message, key=key, hint=hint)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(StoreError):
    """The store did not answer, and nothing was changed."""


class OutcomeUnknown(StoreError):
    """A write was sent and its answer is lost: it may or may not have taken effect."""


class Refused(StoreError):
    """The credentials are missing, wrong, or do not allow this."""


class BucketNotFound(StoreError):
    """The bucket does not exist."""


class Unsupported(StoreError):
    """The store cannot keep a promise that Penstock needs."""


class QueueNotFound(PenstockError):
    """There is no such queue in the store."""


class WorkerIdConflict(PenstockError):
    """Another worker has the same name, and its lease has not ended."""


class WorkerLeaseLost(WorkerIdConflict):
    """The lease on a worker's name was lost while it ran: it has stopped."""


class QueueDrained(PenstockError):
    """The queue takes no more tasks, of this type or at all, until it is resumed."""


class ScheduleNotFound(PenstockError):
    """There is no such schedule in the queue."""


class BatchNotFound(PenstockError):
    """Nothing is known of this batch: it never was, or is forgotten."""


class TaskError(PenstockError):
    """A task is not there, or did not end as was hoped."""

    def __init__(self, message: str, *, task: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.task = task


class TaskNotFound(TaskError):
    """Nothing is known of this task."""


class TaskFailed(TaskError):
    """The task failed for good. `error` is the name of the exception's class."""

    def __init__(self, message: str, *, task: str = "", error: str = "", hint: str = "") -> None:
        super().__init__(message, task=task, hint=hint)
        self.error = error


class TaskCancelled(TaskError):
    """The task was cancelled."""


class PayloadLost(TaskError):
    """The large input or result of a task is gone, or is not what was stored."""


class KeyConflict(TaskError):
    """The key of a submit is taken by a task with another input; `task` is its id."""


class NotSettled(TaskError, TimeoutError):
    """The task has not ended in the time that was given."""


class WorkFailed(PenstockError):
    """The work of a task failed. `is_retried` is false if another attempt would fail just so.

    `runs_alone` is true if the process died that it ran in: later attempts run there by themselves.
    """

    def __init__(
        self, message: str, *, is_retried: bool = True, runs_alone: bool = False, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.is_retried = is_retried
        self.runs_alone = runs_alone


class WorkReleased(WorkFailed):
    """The work of a task is handed back: it has not failed, and another attempt may run it.

    `is_delayed` is true if this worker cannot run it: then others are to have their chance first.
    """

    def __init__(
        self, message: str, *, is_delayed: bool = True, runs_alone: bool = False, hint: str = ""
    ) -> None:
        super().__init__(message, runs_alone=runs_alone, hint=hint)
        self.is_delayed = is_delayed


class SecretUnavailable(PenstockError):
    """A secret cannot be had. The message says why, without its value, and goes on after its name.

    `is_retried` is false if it will not be had later either.
    """

    def __init__(self, message: str, *, is_retried: bool = True, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.is_retried = is_retried


class SchemaRefused(PenstockError):
    """What was made does not fit the schema of its dataset. `column` is the one that does not."""

    def __init__(self, message: str, *, hint: str = "", column: str = "") -> None:
        super().__init__(message, hint=hint)
        self.column = column


class Damaged(PenstockError):
    """A file of a dataset is not what its manifest says. Another try would find the same."""

    def __init__(self, message: str, *, hint: str = "", location: str = "") -> None:
        super().__init__(message, hint=hint)
        self.location = location


class DispatcherError(PenstockError):
    """A request to a dispatcher did not do what was asked."""


class DispatcherUnavailable(DispatcherError):
    """No dispatcher answered, or it could not serve now. Every request may be repeated.

    `is_faulty` is that one has tried, and what came of it is no answer: it may always be so.
    """

    def __init__(self, message: str, *, hint: str = "", is_faulty: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.is_faulty = is_faulty


class DispatcherRefused(DispatcherError):
    """The dispatcher answered no. `status` is HTTP's, `kind` the word for programs.

    `field` is where in the request it is, if one place of it is wrong; `position` where in the
    text of a query.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        kind: str = "",
        field: str = "",
        hint: str = "",
        position: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.kind = kind
        self.field = field
        self.position = position


class TokenRefused(PenstockError):
    """A capability token proves nothing here. `kind` is the word for programs.

    It is one of: missing, malformed, unknown key, bad signature, wrong issuer, wrong audience,
    expired, not yet valid, another attempt, former attempt, not granted.
    """

    def __init__(self, message: str, *, kind: str = "malformed", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class SignerUnavailable(PenstockError):
    """Nothing can be signed now; whoever needs a token may ask again."""


class CredentialsRefused(PenstockError):
    """No credentials can be minted for this token, now or later. `kind` is the word for programs.

    It is `too many folders` where asking for fewer of them would do, else `no credentials`.
    """

    def __init__(self, message: str, *, kind: str = "no credentials", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class CredentialsUnavailable(PenstockError):
    """Credentials could not be minted now: who mints them is away, or asked too often."""


class DatabaseUnavailable(PenstockError):
    """Postgres did not answer, or not in time.

    Whether the transaction was committed is not known. Every operation of the dispatcher may be
    repeated: what was done is found done.
    """


class MigrationRefused(PenstockError):
    """The database is not one that this release can bring forward."""


class UnreadableObject(PenstockError):
    """An object is not in a form that this release can read."""


class NotOurs(UnreadableObject):
    """The object was not written by Penstock, or is damaged."""


class NewerFormat(UnreadableObject):
    """The object was written by a later release of Penstock."""


RESCHEDULE_SECONDS_MAX: Final = 366 * 86_400.0


class DoNotRetry(Exception):
    """Raised by a user's function: another attempt would fail just so."""


class Reschedule(Exception):
    """Raised by a handler of a queue: not now, but again after `seconds`.

    The attempt has not failed and does not count. What must not go on for ever has an expiry.

        if not is_uploaded(task.input):
            raise Reschedule(60, reason="not uploaded yet")
    """

    def __init__(self, seconds: float, *, reason: str = "") -> None:
        if isinstance(seconds, bool) or not 0 <= seconds <= RESCHEDULE_SECONDS_MAX:
            raise InvalidInput(
                f"A task cannot be rescheduled by {seconds!r} s.",
                hint=f"Give a number of seconds from 0 to {RESCHEDULE_SECONDS_MAX:,.0f}, a year.",
            )
        super().__init__(reason or f"again in {seconds:g} s")
        self.seconds = float(seconds)
        self.reason = reason
