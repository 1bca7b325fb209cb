import json
import random
import sysconfig

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from training.data import (
    BlockMaker,
    Packer,
    Source,
    StreamedBlocks,
    first_validation_blocks,
    is_validation,
    mixed_blocks,
)
from training.python_docs import python_docs
from training.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer

TEXTS = [
    f"Document {number}: " + " ".join(str(number * place) for place in range(number % 37)) for number in range(400)
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=50)
    return path


def maker(tokenizer, tmp_path, fraction=0.1):
    return BlockMaker(tokenizer, 32, fraction, tmp_path / "cache")


def test_parquet_jsonl_and_text_give_the_same_documents(tmp_path, parquet):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, text in enumerate(TEXTS[:20]):
        (folder / f"{number:03}.txt").write_text(text)
    assert list(Source(str(parquet)).documents()) == TEXTS
    assert list(Source(str(tmp_path / "texts.jsonl"), text_column="body").documents()) == TEXTS
    assert list(Source(str(folder / "*.txt")).documents()) == TEXTS[:20]
    assert list(Source(str(parquet), max_documents=3).documents()) == TEXTS[:3]
    assert list(Source(str(parquet), streaming=True).documents()) == TEXTS


def test_nothing_is_dropped_but_the_last_remainder(tokenizer):
    packer = Packer(tokenizer, 32)
    blocks = np.concatenate([packer.add(TEXTS[:150]), packer.add(TEXTS[150:])])
    everything = [id for text in TEXTS for id in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert blocks.ravel().tolist() == everything[: len(everything) // 32 * 32]
    assert packer.rest.tolist() == everything[len(everything) // 32 * 32 :]


def test_the_split_depends_on_the_text_alone_and_has_the_stated_share(tokenizer, tmp_path, parquet):
    held_out = [text for text in TEXTS if is_validation(text, 0.1)]
    assert 20 < len(held_out) < 60
    assert set(held_out) <= {text for text in TEXTS if is_validation(text, 0.2)}
    blocks = {}
    for validation in (True, False):
        dataset = maker(tokenizer, tmp_path).blocks(Source(str(parquet)), validation)
        texts = tokenizer.decode(dataset["input_ids"][:].flatten()).split(END_OF_TEXT)
        blocks[validation] = set(texts[:-1])
    assert blocks[True] <= set(held_out)
    assert blocks[False].isdisjoint(held_out)
    assert len(blocks[False]) > 300


def test_text_is_tokenized_once_unless_something_changes(tokenizer, tmp_path, parquet, monkeypatch):
    make, source = maker(tokenizer, tmp_path), Source(str(parquet))
    first = make.blocks(source, False)["input_ids"][:]
    made = sorted(path.name for path in (tmp_path / "cache").iterdir())
    monkeypatch.setattr(Source, "documents", lambda self: pytest.fail("read again"))
    assert (make.blocks(source, False)["input_ids"][:] == first).all()
    monkeypatch.undo()
    pq.write_table(pa.table({"text": TEXTS[:200]}), parquet)
    assert len(make.blocks(source, False)) < len(first)
    assert len(list((tmp_path / "cache").iterdir())) == 2 * len(made)
    assert all(path.suffix == ".arrow" for path in (tmp_path / "cache").iterdir())


def test_an_interrupted_tokenization_leaves_nothing_behind(tokenizer, tmp_path, parquet, monkeypatch):
    def interrupted(self):
        yield from TEXTS[:300]
        raise KeyboardInterrupt

    monkeypatch.setattr(Source, "documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        maker(tokenizer, tmp_path).blocks(Source(str(parquet)), False)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_resumed_run_uses_the_blocks_that_it_started_with(tokenizer, tmp_path, parquet):
    make = BlockMaker(tokenizer, 32, 0.1, tmp_path / "cache", record=tmp_path / "run" / "blocks.json")
    first = make.blocks(Source(str(parquet)), False)["input_ids"][:]
    pq.write_table(pa.table({"text": TEXTS[:200]}), parquet)
    assert (make.blocks(Source(str(parquet)), False)["input_ids"][:] == first).all()


def test_two_sources_with_one_path_are_two(tokenizer, tmp_path):
    path = tmp_path / "two.parquet"
    pq.write_table(pa.table({"a": ["alpha " * 400], "b": ["beta " * 400]}), path)
    make = BlockMaker(tokenizer, 32, 0.0, tmp_path / "cache", record=tmp_path / "blocks.json")
    for column, word in (("a", "alpha"), ("b", "beta")):
        blocks = make.blocks(Source(str(path), text_column=column), False)["input_ids"]
        assert tokenizer.decode(blocks[0]).startswith(word)
    make.block_size = 16  # a record of other blocks is not taken for these
    assert make.blocks(Source(str(path), text_column="a"), False)["input_ids"][:].shape[1] == 16


def test_sources_are_mixed_by_weight_until_all_are_seen(tokenizer, tmp_path, parquet):
    other = tmp_path / "other.txt"
    other.write_text("x y z " * 3000)
    make = maker(tokenizer, tmp_path, fraction=0.0)
    sources = [Source(str(parquet), weight=3), Source(str(other), weight=1)]
    mixed = mixed_blocks(make, sources, validation=False, seed=0)["input_ids"][:]
    parts = [{tuple(row) for row in make.blocks(source, False)["input_ids"][:].tolist()} for source in sources]
    rows = [tuple(row) for row in mixed.tolist()]
    assert set(rows) == parts[0] | parts[1]
    share = sum(row in parts[0] for row in rows) / len(rows)
    assert abs(share - 0.75) < 0.06


@pytest.mark.parametrize("stop", [1, 15, 16, 17, 100, 333])
def test_a_stream_goes_on_from_any_place(tokenizer, tmp_path, parquet, stop):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": text[::-1]}) + "\n" for text in TEXTS))
    sources = [Source(str(parquet), streaming=True, weight=2), Source(str(other), streaming=True)]

    def stream():
        return StreamedBlocks(sources, tokenizer, 32, 0.1, seed=0)

    whole = iter(stream())
    blocks = [next(whole)["input_ids"] for _ in range(stop + 400)]  # several epochs
    reading, iterator = (first := stream()), iter(first)
    for _ in range(stop + 40):  # read ahead of the place that is saved
        next(iterator)
    position = json.loads(json.dumps(reading.position_at(stop)))
    resumed = stream()
    resumed.start_at(position)
    again = iter(resumed)
    assert all((next(again)["input_ids"] == block).all() for block in blocks[stop:])
    assert resumed.position_at(stop)["blocks"] <= stop


def test_a_stream_that_is_taken_up_again_and_again_gives_what_one_reading_gives(tokenizer, parquet):
    def stream():
        return StreamedBlocks([Source(str(parquet), streaming=True)], tokenizer, 32, 0.1, seed=0)

    whole = iter(stream())
    blocks = [next(whole)["input_ids"] for _ in range(2500)]  # many epochs
    steps, done, position = random.Random(0), 0, None
    while done < 2400:
        taken_up = stream()
        taken_up.start_at(position)
        iterator, count = iter(taken_up), steps.randint(1, 60)
        for place in range(done, done + count):
            assert (next(iterator)["input_ids"] == blocks[place]).all()
        for _ in range(steps.randint(0, 8)):  # read ahead
            next(iterator)
        done += count
        position = json.loads(json.dumps(taken_up.position_at(done)))


def test_streams_hold_the_same_documents_out(tokenizer, tmp_path, parquet):
    source = Source(str(parquet), streaming=True)
    make = maker(tokenizer, tmp_path)
    held_out = first_validation_blocks(source, make, 4)
    expected = make.blocks(Source(str(parquet)), True)["input_ids"][:4].numpy()
    assert np.array_equal(np.stack([block["input_ids"] for block in held_out]), expected)
    stream = iter(StreamedBlocks([source], tokenizer, 32, 0.1, seed=0))
    streamed = np.stack([next(stream)["input_ids"] for _ in range(50)])
    assert np.array_equal(streamed, make.blocks(Source(str(parquet)), False)["input_ids"][:50].numpy())


def test_python_docs_is_english_and_each_string_once():
    documents = []
    for document in python_docs():
        documents.append(document)
        if len(documents) == 200:
            break
    assert len(set(documents)) == 200
    assert sum(" the " in document for document in documents) > 100


def test_python_docs_of_an_installation_below_a_folder_of_tests(tmp_path, monkeypatch):
    (tmp_path / "tests" / "lib" / "tests").mkdir(parents=True)
    for name in ("module.py", "tests/test_module.py"):
        (tmp_path / "tests" / "lib" / name).write_text(f'"""{"What it is for. " * 8}{name}"""\n')
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "tests" / "lib"))
    assert [document.rsplit(maxsplit=1)[1] for document in python_docs()] == ["module.py"]


def test_a_stream_keeps_a_long_document_once(tokenizer, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": " ".join(TEXTS) * 40}) + "\n")
    blocks = StreamedBlocks([Source(str(tmp_path / "long.jsonl"), streaming=True)], tokenizer, 32, 0.0, seed=0)
    iterator = iter(blocks)
    for _ in range(100):
        next(iterator)
    first, last = (place["readers"][0]["ready"] for place in (blocks._places[1], blocks._places[-1]))
    assert len(last) > 100
    assert all(a is b for a, b in zip(reversed(first), reversed(last), strict=False))


def test_bad_sources_are_sentences(tokenizer, tmp_path):
    make = maker(tokenizer, tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        make.blocks(Source(str(tmp_path / "missing.parquet")), False)
    (tmp_path / "corrupt.parquet").write_bytes(b"PAR1 this is no parquet file")
    with pytest.raises(ValueError, match=r"corrupt\.parquet can't be read"):
        make.blocks(Source(str(tmp_path / "corrupt.parquet")), False)
    (tmp_path / "empty.txt").write_text("  \n")
    with pytest.raises(ValueError, match="no training block"):
        mixed_blocks(make, [Source(str(tmp_path / "empty.txt"))], validation=False, seed=0)
    pq.write_table(pa.table({"content": TEXTS}), tmp_path / "column.parquet")
    with pytest.raises(ValueError, match="set `text_column` to one of content"):
        make.blocks(Source(str(tmp_path / "column.parquet")), False)
    for wrong in ({"paht": "x"}, {"name": "x"}, 3):
        with pytest.raises(ValueError, match="must be a path or a mapping"):
            Source.parse(wrong)
    for settings, message in (
        ({"weight": 0}, "above 0"),
        ({"weight": "a"}, "above 0"),
        ({"max_documents": -1}, "max_documents"),
        ({"path": "python-docs", "streaming": True}, "can't be streamed"),
    ):
        with pytest.raises(ValueError, match=message):
            Source.parse({"path": "x", **settings})
    (tmp_path / "corrupt.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"corrupt\.jsonl can't be read"):
            list(Source(str(tmp_path / "corrupt.jsonl"), streaming=streaming).documents())
    with pytest.raises(ValueError, match="can't be loaded"):
        load_tokenizer(str(tmp_path))


def test_tokenizers(tokenizer, tmp_path):
    assert len(tokenizer) == 300
    text = "Ünïcode, 日本語 and\n\ttabs"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).get_vocab() == tokenizer.get_vocab()
    bare = tmp_path / "bare"
    bare.mkdir()
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    (bare / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (bare / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    assert load_tokenizer(str(bare))(TEXTS[30])["input_ids"] == tokenizer(TEXTS[30])["input_ids"]
