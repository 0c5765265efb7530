"""The same run by the Hugging Face Trainer on GPT2LMHeadModel: same data, same settings, same files.

loop.py     what train.py calls; refuses what this loop cannot do
stock.py    their Trainer, with the recipe's settings
twin.py     their model in the memory of ours

What it trains is what is evaluated, sampled, saved and resumed, by the code that serves the other loop. The batches and
their order, the rate of every step and the seeds of the dropout masks are the recipe's too; forward, loss, clipping and
AdamW are theirs. Needs transformers (5 or newer) and accelerate.
"""
