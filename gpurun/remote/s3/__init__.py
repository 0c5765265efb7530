"""The bucket beside the machine: what is sent there once is pulled from there by every machine that needs it.

`address` is where; `wire` is the only room here that touches boto3, and `trouble` says what S3's refusals mean.
`objects` has the names and the index of what lies there, `upload` brings a file there, `order` has a machine pull it.
`slots` is what a machine may push there, and `pushed` reads that back. A machine has presigned URLs and never a key.
"""
