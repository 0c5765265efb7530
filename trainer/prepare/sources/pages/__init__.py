"""A column of text in a Parquet file, read without ever holding a page: for pages of hundreds of megabytes.

    headers.py -> codecs.py -> values.py        where the pages lie, their bytes unpacked, the values in them

pyarrow reads all other pages: it holds a whole one, and two copies of a dictionary.
"""

from trainer.prepare.sources.pages.part import Source
from trainer.prepare.sources.pages.values import Chunk, is_known, largest_page, values

__all__ = ["Chunk", "Source", "is_known", "largest_page", "values"]
