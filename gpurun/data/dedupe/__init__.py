"""Finds duplicate documents, so that only the first of each is trained on. No torch.

fingerprint.py  what is compared: a document's address, its text, its MinHash signature (datasketch's)
signatures.py   the file with a task's fingerprints, in the order of its documents
search.py       which documents repeat an earlier one, over all those files
stage.py        signing a task, searching once, and the filter for a task's documents
"""
