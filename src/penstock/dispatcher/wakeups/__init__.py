"""Wake-ups: the words "this operator has work", from the relay to workers.

`base` says what is promised; `bucket` carries them through the bucket queue, `sqs` through SQS.
"""
