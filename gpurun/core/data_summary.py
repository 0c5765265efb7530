"""What a run trains on, as its plan has it: shards in a folder, public shards, or the data of a command."""

from __future__ import annotations

from gpurun.core.records import Frozen


class PublicFile(Frozen):
    """A public shard that the machine downloads itself: its name among the data, and what it must be."""

    name: str
    url: str
    bytes: int
    sha256: str


class DataSummary(Frozen):
    """The shards that a run trains on, in `folder`, or a command's data, which has no tokens that anybody counted.

    `beside` is a folder with data.json, vocab.json and prompts.json, for shards that belong to nobody's run; else "".
    `passed_over` is what of the text's folder is not in them, by reason: "2 binary, 1 in rows". `public` are those of
    the shards that are not in the folder; `bytes` counts them too.
    """

    folder: str
    beside: str = ""
    tokenizer: str = ""
    tokenizer_sha256: str = ""
    vocab_size: int = 0
    train_tokens: int = 0
    val_tokens: int = 0
    bytes: int
    sha256: str
    source: str
    passed_over: str = ""
    public: tuple[PublicFile, ...] = ()
    public_origin: str = ""
    """The hub that the user named in place of huggingface.co, which may be in a network of their own."""

    @property
    def public_bytes(self) -> int:
        """What the machine downloads itself."""
        return sum(file.bytes for file in self.public)

    @property
    def is_public(self) -> bool:
        """Whether the machine downloads its shards itself; before they are asked for, their source's name tells."""
        return bool(self.public) or (not self.folder and self.source.startswith("hf:"))
