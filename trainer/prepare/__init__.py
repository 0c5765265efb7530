"""Text in, shards out: what the trainer reads is made here, at home, before anything is rented. No torch.

__main__.py     the command `python -m trainer.prepare`
build.py        from a request to a finished data folder, through the cache
corpus.py       which documents there are, how they are read, cut and held out
tokenizers.py   characters, and GPT-2's byte-pair encoding
parallel.py     the same for sentences with their translations, with pair_tokenizers.py; grammar.py makes some
shards.py       writes llm.c token files and the manifest beside them
folders.py      a folder is there whole or not at all
errors.py       a refusal, with what to do about it
gpt2/           GPT-2's merges, so that tokenising needs no network
"""
