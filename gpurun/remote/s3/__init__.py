"""The bucket beside the machine: its content, who writes it, and what is trusted.

A machine has presigned URLs, which expire, and never a key. `address` says where the bucket is; `s3_client`
is the only module that calls boto3, `s3_errors` explains S3's refusals, `s3_retry` waits for a bucket.

Staged, to be pulled (`s3_upload` and `pull_request` here, `agent/s3_pull.py` there; `objects` has the names):

- `files/SHA256.zst` is a file's parts (`chunks.py`), each compressed separately, joined: a plain .zst file.
- `files/SHA256.json` is the index of the parts, written last; without it the file does not count as staged.

Neither is trusted. The order goes to the machine over SSH: for each file its digest, one URL, and each part's length
as sent and sha256; it is secret and never written down. The machine pulls ranges in parallel, and a part counts
once its digest is right, recorded in `.pulled/SHA256.parts` as `receive` records its own. A public file has no part
digests: it counts once its own digest is right. A complete file is `.pulled/SHA256`, which `begin` reports as held.

Pushed, to be collected (`push_slots` and `pushed_files` here, `agent/s3_push.py` there):

- `slot-NNN` are a bounded number of objects, whose URLs are made before they are needed. Files of a megabyte or more
  have their own slots, smaller ones are joined in shared slots.
- `head` lists the places of each file (slot, offset, bytes), and has the manifest of the files with a place. Its first
  line is its HMAC, by a key that only the laptop and that machine have; a head without a valid HMAC is refused.

A slot that the last head refers to is never written, so the head stays valid after any interruption.
"""
