"""Where documents come from, however large: every file of a source can be read from the middle, and streams.

opening.py     a file, a folder or a data set of the hub as the list of its files, each looked at before any work begins
files.py       what is known of a file, and which part of it is asked for
reading.py     the documents of such a part; a source that changed or went away is a refusal
plain.py       text files, cut into documents
lines.py       JSON Lines; long_lines.py is for lines that are too long for memory
parquet.py     Parquet, row group by row group
streams.py     plain, gzip and zstd files as bytes from any place on
hub.py         data sets of the Hugging Face hub, by their files
"""
