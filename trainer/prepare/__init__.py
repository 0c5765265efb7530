"""Text in, shards out: what the trainer reads is made here, at home, before anything is rented. No torch.

__main__.py     the command `python -m trainer.prepare`
build.py        from a request to a finished data folder, through the cache
corpus.py       which documents there are, how they are read, cut and held out
tokenizers.py   characters, and GPT-2's byte-pair encoding
parallel.py     the same for sentences with their translations, with pair_tokenizers.py; grammar.py makes some
shards.py       writes llm.c token files and the files beside them; manifest.py is what data.json says
folders.py      a folder is there whole or not at all, and one prepare's at a time
errors.py       a refusal, with what to do about it; program.py tells it to whoever called

corpora.py      the command `python -m trainer.prepare.corpora`: what is too large for one process, or for memory
pipeline.py     from a corpus to a finished data folder; resume.py is how it goes on after it was ended
sources/        text files, JSON Lines, Parquet and the hub, as documents (texts.py) that stream
division.py     a source divided into tasks; task.py writes one of them, jobs.py is what may be done with one
executors.py    who does them: workers.py are processes of our own, datatrove_steps.py our ends of datatrove's pipelines
meter.py        how far they are
vocabulary.py   GPT-2's, the characters of the corpus, or tokens trained on it (bpe.py)
room.py         the disk that the shards will need
dedupe/         which documents repeat an earlier one (datasketch's MinHash)
gpt2/           GPT-2's merges, so that tokenising needs no network
"""
