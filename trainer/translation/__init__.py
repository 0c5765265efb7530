"""Encoder-decoder translation: the Transformer of "Attention is all you need", in the pre-norm form of textbooks.

batch.py    sentence pairs as tensors: source, shifted target, labels and both masks
pairs.py    reads the shards of a parallel text, and chooses the pairs of every step
model.py    encoder, decoder and their loss
decode.py   greedy and beam search
interpret.py  ids to a translation's ids, and those to text
bleu.py     the quality of translations, by sacrebleu
task.py     what a training loop needs of all this
__main__.py the command `python -m trainer.translation`: BLEU of a run's checkpoint

It follows Vaswani et al. 2017 (arXiv 1706.03762); deviations are marked in place.
"""
