"""Files in a bucket: its layout, who writes what, and what is trusted.

A machine gets presigned URLs, which expire, and never a key. `address` says where the bucket is. `s3_client` is the
only module that calls boto3. `s3_errors` explains S3's refusals. `s3_retry` waits for a bucket.

Staged files, which the machine pulls (`s3_upload` and `pull_request` here, `agent/s3_pull.py` on the machine; `objects`
has the names):

- `files/SHA256.zst` is a file's parts (`chunks.py`), compressed separately and joined: a plain .zst file.
- `files/SHA256.json` is the index of the parts, written last. Without it the file does not count as staged.

Neither is trusted. The machine gets an order over SSH: for each file its digest, one URL, and each part's length as
sent and sha256. The order is secret and never written to disk. The machine pulls ranges in parallel. A part counts once
its digest is right; it is recorded in `.pulled/SHA256.parts`, as `receive` does. A public file has no part digests: it
counts once its own digest is right. A complete file is `.pulled/SHA256`, which `begin` reports as held.

Pushed files, which this computer collects (`push_slots` and `pushed_files` here, `agent/s3_push.py` on the machine):

- `slot-NNN` are a limited number of objects, whose URLs are made before they are needed. Files of a megabyte or more
  have their own slots; smaller ones are joined in shared slots.
- `head` lists the places of each file (slot, offset, bytes), and contains the manifest of the files that have a place.
  Its first line is its HMAC, by a key that only this computer and the machine have. A head without a valid HMAC is
  refused.

A slot to which the last head refers is never written, so the head stays valid after any interruption.
"""
