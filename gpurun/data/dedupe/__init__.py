"""Finds duplicate documents, so that only the first of each is trained on. No torch.

fingerprint.py  computes what is compared: a document's address, its text, its MinHash signature (datasketch's)
signatures.py   writes and reads the file with a task's fingerprints, in the order of its documents
search.py       finds the documents that repeat an earlier document of any task
stage.py        signs the tasks, searches once, and filters a task's documents
"""
