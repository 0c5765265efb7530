"""Finds documents that are there more than once, so that only the first of them is trained on. No torch.

fingerprint.py  what is compared: a document's address, its text, its MinHash signature (datasketch's)
signatures.py   the file that a task's fingerprints lie in, in the order of its documents
search.py       which documents repeat an earlier one, over all those files
stage.py        signing a task, searching once, and the filter that a task's documents go through
"""
