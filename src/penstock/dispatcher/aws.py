"""Clients of AWS for the dispatcher: those of `penstock.kernel.aws`, which lower layers use too."""

from __future__ import annotations

from penstock.kernel import aws as _aws

Aws = _aws.Aws
aws_client = _aws.aws_client
error_code = _aws.error_code
