"""Where events come from: `cron` and `webhook` are processes of their own, `functions` the same two
as functions of AWS Lambda, `auth` judges the proofs of webhooks, and `monitor` keeps always-on
sources running.
"""
