"""Where events come from.

`cron` and `webhook` are processes of their own, `aws_lambda` the same two as functions of AWS
Lambda, `webhook_request` parses requests and verifies their signatures, `client` is what they
need of a dispatcher, and `monitor` keeps always-on sources running.
"""

from __future__ import annotations
