import numpy as np
import pytest
from data.corpora import numbered_documents, write_arrow

from lightning_parm.data import TokenLoader


@pytest.fixture
def corpus(tmp_path):
    for name in ("web", "books"):
        write_arrow(tmp_path / name / "0.arrow", numbered_documents([50] * 20), delimiter=0)
    return tmp_path


def test_a_typo_in_a_path_names_what_is_near(corpus):
    with pytest.raises(ValueError, match=r"there is no .*/wbe\. Did you mean .*/web\?"):
        TokenLoader(str(corpus / "wbe"), 8, 1)
    with pytest.raises(ValueError, match=r"no file matches .*/book/\*\.arrow\. Did you mean .*/books\?"):
        TokenLoader(str(corpus / "book" / "*.arrow"), 8, 1)
    with pytest.raises(ValueError, match=r"there is no .*/zzzzzz/deep\. .* holds books, web\."):
        TokenLoader(str(corpus / "zzzzzz" / "deep"), 8, 1)


def test_an_empty_folder_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"no token files in .* \(0 files looked at\).*lightning-parm tokenize"):
        TokenLoader(str(tmp_path), 8, 1)


def test_a_corpus_smaller_than_one_window_gives_the_numbers(corpus):
    with pytest.raises(ValueError, match=r"1020 tokens in 20 documents, less than one window of .* = 4097"):
        TokenLoader(str(corpus / "web"), 4096, 1)


def test_a_checkpoint_of_other_data_says_what_differs(corpus):
    state = TokenLoader(str(corpus / "web"), 8, 1).state_dict()
    write_arrow(corpus / "web" / "1.arrow", numbered_documents([50]), delimiter=0)
    with pytest.raises(ValueError, match=r"has 2 files where the checkpoint's had 1.*add it as another source"):
        TokenLoader(str(corpus / "web"), 8, 1).load_state_dict(state)
    (corpus / "web" / "1.arrow").unlink()
    (corpus / "web" / "0.arrow").rename(corpus / "web" / "zero.arrow")
    with pytest.raises(ValueError, match="other file names"):
        TokenLoader(str(corpus / "web"), 8, 1).load_state_dict(state)
    write_arrow(corpus / "web" / "0.arrow", numbered_documents([50] * 19 + [49]), delimiter=0)
    (corpus / "web" / "zero.arrow").unlink()
    with pytest.raises(ValueError, match="1019 tokens in 20 documents where the checkpoint's had 1020 in 20"):
        TokenLoader(str(corpus / "web"), 8, 1).load_state_dict(state)


@pytest.mark.parametrize(("name", "value"), [("sequence_length", 16), ("seed", 1), ("num_logical_shards", 512)])
def test_a_checkpoint_of_another_order_says_what_differs(corpus, name, value):
    arguments = {"sequence_length": 8, "seed": 0, "num_logical_shards": 1024}
    state = TokenLoader(str(corpus / "web"), batch_size=1, **arguments).state_dict()
    with pytest.raises(ValueError, match=f"{name}={arguments[name]} and the loader has {name}={value}"):
        TokenLoader(str(corpus / "web"), batch_size=1, **{**arguments, name: value}).load_state_dict(state)


def test_moving_the_data_is_no_change(corpus):
    state = TokenLoader(str(corpus / "web"), 8, 1).state_dict()
    (corpus / "web").rename(corpus / "elsewhere")
    TokenLoader(str(corpus / "elsewhere"), 8, 1).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"num_logical_shards": 1000}, "num_logical_shards=1000 is not a power of two"),
        ({"rank": 2, "size": 2}, "rank=2 is not below size=2"),
        ({"weights": {"wbe": 1.0}}, r"weights name \['wbe'\], but the sources are \['data'\]"),
        ({"weights": {"data": -1.0}}, "none may be negative"),
        ({"weights": {"data": 0.0}}, "one must be positive"),
    ],
)
def test_arguments_out_of_range(corpus, arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenLoader(str(corpus / "web"), **{"sequence_length": 8, "batch_size": 1, **arguments})


def test_no_sources():
    with pytest.raises(ValueError, match="sources is empty"):
        TokenLoader({}, 8, 1)


def test_a_truncated_file_is_named_or_skipped(corpus):
    whole = (corpus / "web" / "0.arrow").read_bytes()
    (corpus / "web" / "1.arrow").write_bytes(whole[: len(whole) // 2])
    (corpus / "web" / "2.arrow").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"1\.arrow is not a complete Arrow file .*\(2 such files\).*bad_files=\"skip\""
    ):
        TokenLoader(str(corpus / "web"), 8, 1)
    loader = TokenLoader(str(corpus / "web"), 8, 1, bad_files="skip")
    assert [name for name, _ in loader.sources[0].index.skipped] == ["1.arrow", "2.arrow"]
    assert np.isfinite(next(iter(loader))["input_ids"].float().numpy()).all()


def test_files_of_different_tokenizers_are_refused(corpus):
    write_arrow(corpus / "web" / "1.arrow", numbered_documents([50]), delimiter=7)
    with pytest.raises(ValueError, match=r"different delimiters \(\[0, 7\]\)"):
        TokenLoader(str(corpus / "web"), 8, 1)
