"""scripts/prepare_corpus.py: its output, reproducibility, and refusals.

Would catch: a split that depends on order or run, an end token that Megatron's NullTokenizer does
not expect, a failed run that leaves files or prints a traceback.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_corpus.py"
VOCAB_SIZE = 300
FILES = ("corpus.bin", "corpus.idx", "corpus_valid.bin", "corpus_valid.idx", "tokenizer.json")


def run_script(*arguments: str | float | Path) -> subprocess.CompletedProcess[str]:
    """Run the script as a user would."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def make_text(folder: Path, *, num_files: int = 40) -> Path:
    """Write small distinct documents, which contain the text of the end token."""
    folder.mkdir()
    random_words = random.Random(5)
    for number in range(num_files):
        words = [random_words.choice(["tensor", "replica", "шар", "outer"]) for _ in range(60)]
        text = f"document {number} <|endoftext|>\n" + " ".join(words)
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


def make_corpus(folder: Path, text: Path) -> dict[str, Any]:
    """Run the script on `text` and return corpus.json."""
    done = run_script(
        "--output-dir", folder, "--vocab-size", VOCAB_SIZE, "--input", text, "--valid-percent", 25
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "corpus.json").read_text())
    assert json.loads(done.stdout) == summary
    return dict(summary)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text") / "docs")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "new" / "corpus"
    make_corpus(folder, text)
    return folder


def documents(corpus: Path, name: str) -> list[list[int]]:
    """Read the token ids of every document with Megatron."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(corpus / name))
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_same_input_gives_the_same_bytes(corpus: Path, text: Path, tmp_path: Path) -> None:
    make_corpus(tmp_path, text)
    for name in (*FILES, "corpus.json"):
        assert (tmp_path / name).read_bytes() == (corpus / name).read_bytes(), name


def test_output_folder_holds_only_corpus(corpus: Path) -> None:
    assert sorted(p.name for p in corpus.iterdir()) == sorted((*FILES, "corpus.json"))


def test_counts_match_datasets(corpus: Path) -> None:
    summary = json.loads((corpus / "corpus.json").read_text())
    for part, name in (("train", "corpus"), ("valid", "corpus_valid")):
        read = documents(corpus, name)
        assert summary[part]["documents"] == len(read)
        assert summary[part]["tokens"] == sum(map(len, read))
        digest = hashlib.sha256((corpus / f"{name}.bin").read_bytes()).hexdigest()
        assert summary[part]["sha256"] == digest
    assert summary["train"]["documents"] + summary["valid"]["documents"] == 40


def test_tokens_decode_to_text_and_end_with_last_id(corpus: Path, text: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id("<|endoftext|>") == VOCAB_SIZE - 1
    halves = []
    for name in ("corpus", "corpus_valid"):
        read = documents(corpus, name)
        # Only at the end: text that spells the token is not converted to it.
        assert all(ids.index(VOCAB_SIZE - 1) == len(ids) - 1 for ids in read)
        halves.append({tokenizer.decode(ids[:-1]) for ids in read})
    train, valid = halves
    assert not train & valid
    assert train | valid == {path.read_text(encoding="utf-8") for path in text.iterdir()}


def test_standard_library_is_the_default(tmp_path: Path) -> None:
    done = run_script("--output-dir", tmp_path, "--vocab-size", 300, "--max-megabytes", 0.5)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "corpus.json").read_text())
    assert 0.3e6 < summary["train"]["bytes"] + summary["valid"]["bytes"] <= 0.5e6


def test_new_corpus_removes_stale_megatron_index(corpus: Path, tmp_path: Path) -> None:
    stale = tmp_path / "corpus" / "cache" / "GPTDataset_indices" / "x.npy"
    stale.parent.mkdir(parents=True)
    stale.touch()
    make_corpus(tmp_path, make_text(tmp_path / "docs"))
    assert not stale.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab-size", "256"], "--vocab-size 256"),
        (["--vocab-size", "many"], "--vocab-size"),
        (["--vocab-size", "60000"], "use --vocab-size"),
        (["--valid-percent", "0"], "--valid-percent 0"),
        (["--valid-percent", "nan"], "--valid-percent nan"),
        (["--valid-percent", "51"], "--valid-percent 51"),
        (["--valid-percent", "0.0001"], "0 held out"),
        (["--max-megabytes", "-1"], "--max-megabytes -1"),
        (["--input", "no/such/place"], "--input no/such/place"),
        (["--input", "BLANK"], "0 documents"),
        (["--input", "BINARY"], "not UTF-8 text"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfa")
    names = {"BLANK": str(tmp_path / "blank.txt"), "BINARY": str(tmp_path / "binary")}
    arguments = [names.get(argument, argument) for argument in arguments]
    if "--input" not in arguments:
        arguments += ["--input", str(text)]
    output = tmp_path / "deep" / "output"
    done = run_script("--output-dir", output, *arguments)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("corpus: ")]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1 and lines[0].startswith("prepare_corpus: ") and message in lines[0], (
        lines
    )
    assert not output.parent.exists(), "something was left behind"


def test_unwritable_output_is_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_script("--output-dir", tmp_path / "file" / "corpus", "--input", text)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "cannot be written" in done.stderr
