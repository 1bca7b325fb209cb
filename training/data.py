"""From sources of text to blocks of tokens.

A source is a local file (parquet, jsonl, text), a dataset on the Hub, or `python-docs`. Its documents are split into
training and validation by a hash of their text, so that the split is the same everywhere; they are joined by
end-of-text and cut into blocks, of which only the last, incomplete one is dropped.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from .python_docs import installation_fingerprint, python_docs

FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text", ".text": "text", ".md": "text"}
BLOCKS_BETWEEN_PLACES = 16  # of a stream, from where reading can go on


@dataclass
class Source:
    """Where documents come from.

    Args:
        path: A file (or a pattern such as `texts/*.txt`), the name of a dataset on the Hub, or `python-docs`.
        name: Configuration of a dataset on the Hub.
        split: Split of a dataset on the Hub.
        text_column: The column that holds the text.
        weight: How often blocks of this source are drawn, relative to the other sources'.
        streaming: Read documents as training needs them, instead of all of them before it starts.
        max_documents: Read no more than this many.
    """

    path: str
    name: str | None = None
    split: str = "train"
    text_column: str = "text"
    weight: float = 1.0
    streaming: bool = False
    max_documents: int | None = None

    @classmethod
    def parse(cls, given: Any) -> "Source":
        """From a recipe: a path, or a mapping of the fields above."""
        settings = {"path": given} if isinstance(given, str) else given
        known = cls.__dataclass_fields__
        if not isinstance(settings, dict) or "path" not in settings or not set(settings) <= set(known):
            raise ValueError(f"`sources` has {given!r}, but each must be a path or a mapping of {', '.join(known)}.")
        source = cls(**settings)
        if isinstance(source.weight, str | bool) or not source.weight > 0:
            raise ValueError(f"`weight` of source {source.path} is {source.weight!r}, but must be a number above 0.")
        if source.max_documents is not None and (not isinstance(source.max_documents, int) or source.max_documents < 1):
            raise ValueError(
                f"`max_documents` of source {source.path} is {source.max_documents!r}, but must be an int >= 1."
            )
        if source.path == "python-docs" and source.streaming:
            raise ValueError("python-docs can't be streamed: leave `streaming` out, for all sources.")
        return source

    @property
    def is_local(self) -> bool:
        return Path(self.path).suffix in FORMATS

    def fingerprint(self) -> str:
        """Changes when the documents change."""
        if self.path == "python-docs":
            return installation_fingerprint()
        if not self.is_local:
            return ""
        return "".join(f"{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in self._files())

    def load(self) -> datasets.IterableDataset | datasets.Dataset | Iterator[dict[str, str]]:
        """The rows, each a mapping that has the text column."""
        if self.path == "python-docs":
            return ({self.text_column: text} for text in python_docs())
        try:
            if self.is_local:
                files = [str(file) for file in self._files()]
                options = {"sample_by": "document"} if FORMATS[Path(self.path).suffix] == "text" else {}
                kind = FORMATS[Path(self.path).suffix]
                rows = datasets.load_dataset(kind, data_files=files, split="train", streaming=self.streaming, **options)
            else:
                rows = datasets.load_dataset(self.path, self.name, split=self.split, streaming=self.streaming)
        except Exception as error:
            raise ValueError(f"source {self.path} can't be read: {_first_line(error)}") from error
        if rows.column_names and self.text_column not in rows.column_names:
            columns = ", ".join(rows.column_names)
            raise ValueError(
                f"source {self.path} has no column {self.text_column!r}: set `text_column` to one of {columns}."
            )
        return rows.take(self.max_documents) if self.streaming and self.max_documents else rows

    def documents(self) -> Iterator[str]:
        """All texts that are not blank."""
        try:
            for row in islice(self.load(), self.max_documents):
                text = row[self.text_column]
                if isinstance(text, str) and text.strip():
                    yield text
        except (datasets.exceptions.DatasetGenerationError, OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"source {self.path} can't be read: {_first_line(error)}") from error

    def _files(self) -> list[Path]:
        path = Path(self.path)
        if path.is_file():
            return [path]
        files = sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
        if not files:
            raise FileNotFoundError(f"`sources` names {self.path}, but there is no such file.")
        return files


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document is held out: decided by its text alone."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "big") < fraction * 2**32


class Packer:
    """Joins documents, each with an end-of-text behind it, and cuts them into full blocks."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, block_size: int):
        self.tokenizer, self.block_size = tokenizer, block_size
        self.rest = np.empty(0, dtype=np.int32)  # tokens that do not fill a block yet

    def add(self, texts: list[str]) -> np.ndarray:
        """The blocks [n, block_size] that these texts complete."""
        ids = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        ended = [np.array([*of_text, self.tokenizer.eos_token_id], dtype=np.int32) for of_text in ids]
        tokens = np.concatenate([self.rest, *ended])
        full = len(tokens) // self.block_size * self.block_size
        self.rest = tokens[full:]
        return tokens[:full].reshape(-1, self.block_size)


def collate(blocks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch for a causal language model: text is its own target. `task` stands for rows that `TaskFeed` makes."""
    if "task" in blocks[0]:
        return {"task": torch.tensor([block["task"] for block in blocks])}
    input_ids = torch.stack([torch.as_tensor(block["input_ids"]) for block in blocks]).long()
    if "labels" not in blocks[0]:
        return {"input_ids": input_ids, "labels": input_ids}
    return {
        "input_ids": input_ids,
        "labels": torch.stack([torch.as_tensor(block["labels"]) for block in blocks]).long(),
    }


@dataclass
class BlockMaker:
    """Makes the blocks of a source, and keeps them on disk so that they are made once.

    `record` is a file of the run that says which blocks it uses, so that a resumed run uses the same ones even where
    the source has changed since (as `python-docs` does with every package that is installed).
    """

    tokenizer: PreTrainedTokenizerBase
    block_size: int
    validation_fraction: float
    cache: Path
    record: Path | None = None

    def blocks(self, source: Source, validation: bool) -> datasets.Dataset:
        key = self._recorded_key(source)
        files = {which: self.cache / f"{key}-{which}.arrow" for which in ("training", "validation")}
        if not all(file.exists() for file in files.values()):
            self._write(source, files)
        return datasets.Dataset.from_file(str(files["validation" if validation else "training"])).with_format("torch")

    def _recorded_key(self, source: Source) -> str:
        if self.record is None:
            return self._key(source)
        keys = json.loads(self.record.read_text()) if self.record.exists() else {}
        asked = json.dumps(self._settings(source))
        if asked not in keys:
            keys[asked] = self._key(source)
            self.record.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.record.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps(keys))
            unfinished.replace(self.record)
        return keys[asked]

    def _settings(self, source: Source) -> list:
        settings = {name: value for name, value in asdict(source).items() if name not in ("weight", "streaming")}
        return [settings, self.block_size, self.validation_fraction]

    def _key(self, source: Source) -> str:
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        parts = [self._settings(source), source.fingerprint(), vocabulary]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()

    def _write(self, source: Source, files: dict[str, Path]) -> None:
        """Both splits in one pass, each beside its place and then moved there: an interruption leaves no half of it."""
        self.cache.mkdir(parents=True, exist_ok=True)
        writers = {which: _BlockFile(file, self.tokenizer, self.block_size) for which, file in files.items()}
        try:
            for text in tqdm(source.documents(), desc=f"tokenizing {source.path}", unit=" documents"):
                writers["validation" if is_validation(text, self.validation_fraction) else "training"].add(text)
            for writer in writers.values():
                writer.finish()
        finally:
            for writer in writers.values():
                writer.unfinished.unlink(missing_ok=True)


class _BlockFile:
    """Writes documents as blocks into an Arrow file, a few at a time."""

    def __init__(self, file: Path, tokenizer: PreTrainedTokenizerBase, block_size: int):
        self.file, self.unfinished = file, file.with_suffix(f".unfinished-{os.getpid()}")
        self.packer = Packer(tokenizer, block_size)
        self.schema = pa.schema({"input_ids": pa.list_(pa.int32(), block_size)})
        self.writer = pa.ipc.new_stream(str(self.unfinished), self.schema)
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        self.texts.append(text)
        if len(self.texts) == 256:
            self._flush()

    def _flush(self) -> None:
        blocks = self.packer.add(self.texts)
        column = pa.FixedSizeListArray.from_arrays(pa.array(blocks.ravel()), self.packer.block_size)
        self.writer.write_batch(pa.record_batch([column], schema=self.schema))
        self.texts.clear()

    def finish(self) -> None:
        if self.texts:
            self._flush()
        self.writer.close()
        self.unfinished.replace(self.file)


def mixed_blocks(makers: BlockMaker, sources: list[Source], validation: bool, seed: int) -> datasets.Dataset:
    """Blocks of all sources, drawn according to their weights until each has been seen whole."""
    parts = [makers.blocks(source, validation) for source in sources]
    for source, part in zip(sources, parts, strict=True):
        if len(part) == 0:
            which = "validation" if validation else "training"
            raise ValueError(
                f"source {source.path} has no {which} block of {makers.block_size} tokens: give more text, a smaller "
                "`block_size`" + (", or a larger `validation_fraction`." if validation else ".")
            )
    if len(parts) == 1:
        return parts[0]
    if validation:
        return datasets.concatenate_datasets(parts)
    total = sum(source.weight for source in sources)
    probabilities = [source.weight / total for source in sources]
    return datasets.interleave_datasets(parts, probabilities, seed=seed, stopping_strategy="all_exhausted")


class StreamedBlocks(torch.utils.data.IterableDataset):
    """Blocks of streamed sources, without end, from any place on.

    A place is saved with every checkpoint (`position_at`) and taken up again (`start_at`) without reading again what
    came before it.
    """

    def __init__(
        self,
        sources: list[Source],
        tokenizer: PreTrainedTokenizerBase,
        block_size: int,
        validation_fraction: float,
        seed: int,
    ):
        self.sources, self.tokenizer, self.block_size = sources, tokenizer, block_size
        self.validation_fraction, self.seed = validation_fraction, seed
        self._start: dict[str, Any] | None = None
        # Places from where reading can go on, the newest last. Batches are fetched ahead of the step that they are for,
        # so a checkpoint needs one that lies a little back.
        self._places: deque[dict[str, Any]] = deque(maxlen=1024)

    def start_at(self, position: dict[str, Any] | None) -> None:
        self._start = position

    @property
    def start_block(self) -> int:
        """Blocks that were used before the place where reading starts."""
        return 0 if self._start is None else self._start["blocks"] + self._start["skip"]

    def position_at(self, blocks: int) -> dict[str, Any] | None:
        """Where to go on after this many blocks; None: at the start."""
        if blocks == self.start_block:
            return self._start
        place = next((place for place in reversed(self._places) if place["blocks"] <= blocks), None)
        if place is None:
            raise RuntimeError(f"the place after {blocks} blocks is not known: the stream was read too far ahead.")
        readers = [
            {**reader, "ready": [block.tolist() for block in reader["ready"]], "rest": reader["rest"].tolist()}
            for reader in place["readers"]
        ]
        return {**place, "readers": readers, "skip": blocks - place["blocks"]}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        readers = [_StreamReader(source, self) for source in self.sources]
        choose = np.random.default_rng(self.seed)
        weights = np.array([source.weight for source in self.sources])
        weights = weights / weights.sum()
        blocks, skip = 0, 0
        if self._start is not None:
            blocks, skip = self._start["blocks"], self._start["skip"]
            choose.bit_generator.state = self._start["choose"]
            for reader, state in zip(readers, self._start["readers"], strict=True):
                reader.load_state(state)
        self._places.clear()
        while True:
            place = {"blocks": blocks, "choose": choose.bit_generator.state, "readers": [r.state() for r in readers]}
            self._places.append(place)
            for _ in range(BLOCKS_BETWEEN_PLACES):
                block = readers[choose.choice(len(readers), p=weights)].next_block()
                blocks += 1
                if skip > 0:
                    skip -= 1
                    continue
                yield {"input_ids": block}


class _StreamReader:
    """Blocks of one streamed source, epoch after epoch, with a state that can be saved."""

    def __init__(self, source: Source, settings: StreamedBlocks):
        self.source, self.validation_fraction = source, settings.validation_fraction
        self.rows = source.load()
        if not isinstance(self.rows, datasets.IterableDataset):
            raise ValueError(f"source {source.path} is not streamed: set `streaming` for all sources or for none.")
        self.packer = Packer(settings.tokenizer, settings.block_size)
        self.ready: deque[np.ndarray] = deque()  # blocks
        self._texts = self._read()
        self._loaded: dict[str, Any] | None = None  # where `rows` will start; until then it does not know itself

    def state(self) -> dict[str, Any]:
        """Shares its arrays, which are never written to: a long document is kept once, not for every place in it."""
        return {"rows": self._loaded or self.rows.state_dict(), "ready": list(self.ready), "rest": self.packer.rest}

    def load_state(self, state: dict[str, Any]) -> None:
        self._loaded = state["rows"]
        self.rows.load_state_dict(state["rows"])
        self.ready = deque(np.array(block, dtype=np.int32) for block in state["ready"])
        self.packer.rest = np.array(state["rest"], dtype=np.int32)

    def _read(self) -> Iterator[str]:
        found = self._loaded is not None  # what is left of an epoch that was taken up may be nothing
        while True:
            for row in self.rows:
                self._loaded = None
                text = row[self.source.text_column]
                if isinstance(text, str) and text.strip() and not is_validation(text, self.validation_fraction):
                    found = True
                    yield text
            if not found:
                raise ValueError(f"source {self.source.path} has no text to train on.")
            found, self._loaded = False, None
            self.rows = self.source.load()  # a new epoch

    def next_block(self) -> np.ndarray:
        while not self.ready:
            self.ready.extend(self.packer.add([next(self._texts)]))
        return self.ready.popleft()


def first_validation_blocks(source: Source, maker: BlockMaker, count: int) -> list[dict[str, np.ndarray]]:
    """The first validation blocks of a streamed source."""
    packer, found = Packer(maker.tokenizer, maker.block_size), []
    with tqdm(total=count, desc=f"reading {source.path} (validation)", unit=" blocks") as progress:
        for text in source.documents():
            if is_validation(text, maker.validation_fraction):
                blocks = packer.add([text])
                found += list(blocks)
                progress.update(len(blocks))
            if len(found) >= count:
                break
    if not found:
        raise ValueError(
            f"source {source.path} has no validation block: give more text or a larger `validation_fraction`."
        )
    return [{"input_ids": block} for block in found[:count]]


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
