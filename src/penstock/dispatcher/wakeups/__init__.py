"""Wake-ups: hints from the relay to workers that an operator has work.

`base` says what is promised; `long_poll` is the default, `bucket` goes through the bucket queue,
`sqs` through SQS; `notifications` connects the brokers of several dispatchers.
"""

from __future__ import annotations
