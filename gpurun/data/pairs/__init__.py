"""Turns sentences and their translations into shards.

build.py        from a request to a finished data folder
tokenizers.py   one vocabulary for both sides
grammar.py      makes English sentences and their German translations by rule
"""
