"""The bucket beside the machine: what lies in it, who writes it, and what is believed of it.

A machine has presigned URLs, which live for a while, and never a key. `address` says where the bucket is; `s3_client`
is the only module that calls boto3, `s3_errors` says what S3's refusals mean, `s3_retry` waits for a bucket.

Staged, to be pulled (`s3_upload` and `pull_request` here, `agent/s3_pull.py` there; `objects` has the names):

- `files/SHA256.zst` is a file's parts (`chunks.py`), each compressed by itself, one after the other: a plain .zst file.
- `files/SHA256.json` is the index of the parts, written last; without it the file does not count as staged.

Neither is believed. The order goes to the machine over SSH: for each file its digest, one URL, and each part's length
as sent and sha256; it is a secret and written nowhere. The machine pulls ranges at the same time, and a part counts
once its digest is right, noted in `.pulled/SHA256.parts` as `receive` notes its own. A public file has no parts with
digests: it counts once its own digest is right. What is there whole is `.pulled/SHA256`, which `begin` names as held.

Pushed, to be collected (`push_slots` and `pushed_files` here, `agent/s3_push.py` there):

- `slot-NNN` are a bounded number of objects, whose URLs are made before they are needed. Files of a megabyte or more
  have slots of their own, smaller ones lie one after the other in shared slots.
- `head` says what is where: the places of each file (slot, offset, bytes), and the manifest of what has a place. Its
  first line is its HMAC by a key that only the laptop and that machine have; what is not signed so is refused.

A slot that the last head speaks of is never written, so what a head promises is there, whatever is cut.
"""
