"""Text in, shards out: what the trainer reads is made here, at home, before anything is rented. No torch.

__main__.py     the command `python -m trainer.prepare`: a text, as a run begins
build.py        from a request to a finished data folder, through the cache
corpus.py       which documents there are, how they are read, cut and held out; listing.py: in which files
pairs/          the same for sentences with their translations
corpora/        the command `python -m trainer.prepare.corpora`: what is too large for one process, or for memory
sources/        where its documents (texts.py) stream from: text files, JSON Lines, Parquet, the hub
dedupe/         which of them repeat an earlier one (datasketch's MinHash)
hellaswag.py    HellaSwag's questions, tokenised beside finished shards

tokenizers.py   characters, and GPT-2's byte-pair encoding; bpe.py trains one like it on the text itself
gpt2/           GPT-2's merges, so that tokenising needs no network
shards.py       writes llm.c token files and the files beside them; manifest.py is what data.json says
folders.py      a folder is there whole or not at all, and one prepare's at a time
errors.py       a refusal, with what to do about it; program.py tells it to the caller
"""
