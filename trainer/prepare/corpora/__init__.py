"""A corpus of any size made into shards: divided into tasks, done by every core, gone on with after any kill. No torch.

__main__.py     the command `python -m trainer.prepare.corpora`
pipeline.py     from a corpus to a finished data folder; resume.py is how it goes on after it was ended
division.py     a source divided into tasks; task.py writes one of them, jobs.py is what may be done with one
executors.py    who does them: workers.py are processes of our own, datatrove_steps.py our ends of datatrove's pipelines
vocabulary.py   GPT-2's, the characters of the corpus, or tokens trained on it
look.py         what is wrong with the rows is found before any work
meter.py        how far they are
room.py         the disk that the shards will need
"""
