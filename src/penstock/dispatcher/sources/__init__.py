"""Where events come from: `cron` and `webhook` are processes of their own, `functions` the same two
as functions of AWS Lambda, and `monitor` keeps always-on sources running.
"""
