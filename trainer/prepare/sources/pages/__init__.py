"""A column of text in a Parquet file, read without ever holding a large page, of which there are hundreds of megabytes.

    headers.py -> codecs.py -> values.py        where the pages lie, their bytes unpacked, the values in them

pyarrow reads small pages, and what is written in a way that is not known here: it holds a page three times.
"""

from trainer.prepare.sources.pages.part import Source
from trainer.prepare.sources.pages.values import Chunk, is_known, largest_page, values

__all__ = ["Chunk", "Source", "is_known", "largest_page", "values"]
