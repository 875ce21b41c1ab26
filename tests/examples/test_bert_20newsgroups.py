"""The example on 20 Newsgroups, on a few texts in scikit-learn's own file, so that nothing is downloaded."""

from __future__ import annotations

import codecs
import importlib.util
import pickle
import random
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sklearn.utils import Bunch

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = {
    "rec.autos": "engine wheel brake",
    "sci.space": "orbit rocket moon",
    "talk.religion.misc": "church faith soul",
}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "bert_20newsgroups", ROOT / "examples" / "bert_20newsgroups.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with scikit-learn's file of the texts, of which there are 60."""
    draw, names = random.Random(0), sorted(SUBJECTS)
    texts = [
        f"From: someone\n\n{' '.join(draw.choices(SUBJECTS[names[i % 3]].split(), k=8))} the and of"
        for i in range(60)
    ]
    part = Bunch(
        data=texts,
        target=torch.arange(60).numpy() % 3,
        target_names=names,
        filenames=torch.arange(60).numpy(),
    )
    packed = codecs.encode(pickle.dumps({"train": part, "test": part}), "zlib_codec")
    (tmp_path / "20news-bydate_py3.pkz").write_bytes(packed)
    return tmp_path


def test_the_texts_are_read(example: ModuleType, folder: Path) -> None:
    source, names = example.newsgroups(None, str(folder)), sorted(SUBJECTS)
    assert source.num_classes == 3
    assert len(source.texts) == 60
    assert not any("someone" in text for text in source.texts)  # its header
    for text, label in zip(source.texts, source.labels.tolist(), strict=True):
        assert set(text.split()) - {"the", "and", "of"} <= set(SUBJECTS[names[label]].split())


def test_words_become_ids(example: ModuleType) -> None:
    data = example.tokenised(["The moon, the MOON!", "", "one two three four five"], torch.zeros(3), length=4)
    ids, mask = (data.tensors[0][name] for name in ("input_ids", "attention_mask"))
    assert ids[0, 0] == ids[0, 2]
    assert ids[0, 1] == ids[0, 3]
    assert len(set(ids[2].tolist())) == 4
    assert mask.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert ids[mask.bool()].min() > 0
    assert ids.max() < example.VOCABULARY
    # The same in any process: Python's own hash of texts is salted.
    assert example.ids_of("moon") == [2872]


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fedhkd"])
def test_a_federation_learns(
    example: ModuleType, folder: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(["--method", method, "--clients", "2", "--rounds", "3", "--folder", str(folder)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert len(lines) == 3
    last = re.search(r"local accuracy ([\d.]+)", lines[2])
    assert last is not None
    assert float(last[1]) > 0.6  # three classes
