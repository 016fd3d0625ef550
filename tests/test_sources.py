"""Several sets of samples in one run: shares worked out by hand, and messages that name the source."""

from collections import Counter
from pathlib import Path

import pytest

from flowshard.config import DataConfig, SourceConfig
from flowshard.data.sources import read_data, samples_of_sources, spread
from flowshard.errors import UserError


def _sources(*values: tuple[int, float | None]) -> list[SourceConfig]:
    return [SourceConfig(metadata="x.csv", repeat=repeat, weight=weight) for repeat, weight in values]


@pytest.mark.parametrize(
    ("rows", "values", "expected"),
    [
        ([5, 3], [(1, None), (1, None)], [5, 3]),
        ([5, 3], [(1, None), (4, None)], [5, 12]),
        # Half and half: the larger set is taken once, so the other has to give as many.
        ([100, 10], [(1, 1), (1, 1)], [100, 100]),
        ([100, 10], [(1, 0.5), (1, 0.5)], [100, 100]),
        # Nine in ten of the small one: all 100 rows of the large one are a tenth of 1000.
        ([100, 10], [(1, 1), (1, 9)], [100, 900]),
        # The large set needs 112 samples, of which 100.8 and 11.2 are the shares.
        ([100, 10], [(1, 9), (1, 1)], [101, 11]),
        ([100, 10], [(2, 1), (1, 1)], [200, 200]),
        ([4], [(3, 7)], [12]),
        ([1, 1, 1], [(1, 1), (1, 1), (1, 1)], [1, 1, 1]),
        # In binary 0.1 + 0.2 + 0.7 is no whole.
        ([1, 1, 1], [(1, 0.1), (1, 0.2), (1, 0.7)], [1, 2, 7]),
    ],
)
def test_shares_are_in_proportion_and_no_row_is_left_out(
    rows: list[int], values: list[tuple[int, float | None]], expected: list[int]
) -> None:
    counts = samples_of_sources(rows, _sources(*values))
    assert counts == expected
    assert all(count >= number * repeat for count, number, (repeat, _) in zip(counts, rows, values, strict=True))


def test_rounding_is_by_the_largest_remainder() -> None:
    # Two rows for 1.5 parts of 3.5 need ceil(2 * 3.5 / 1.5) = 5 samples, of which the shares are 1.43, 1.43 and 2.14: one is
    # left over, for the first of the two largest remainders.
    assert samples_of_sources([1, 1, 2], _sources((1, 1), (1, 1), (1, 1.5))) == [2, 1, 2]


@pytest.mark.parametrize(("rows", "count"), [(5, 5), (5, 13), (3, 2), (7, 100), (1, 4)])
def test_rows_of_a_source_come_as_often_as_one_another(rows: int, count: int) -> None:
    often = Counter(spread(rows, count))
    assert sum(often.values()) == count
    assert max(often.values()) - min(often[row] for row in range(rows)) <= 1


def test_those_that_come_once_more_are_spread_over_the_source() -> None:
    assert spread(10, 14)[10:] == [0, 2, 5, 7]


def test_weights_have_to_make_an_epoch() -> None:
    with pytest.raises(UserError, match=r"data\.sources\.1\.weight: give all sources a weight, or none"):
        samples_of_sources([1, 1], _sources((1, 1), (1, None)))
    with pytest.raises(UserError, match=r"data\.sources: with weights 1, 1e-09 .* 1,000,000,001 samples"):
        samples_of_sources([1, 1], _sources((1, 1), (1, 1e-9)))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two lists in two folders, of two clips and one picture."""
    for name, text in {"a": "video,prompt\nx.mp4,one\ny.mp4,two\n", "b": "file_name,text\nx.png,three\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "list.csv").write_text(text)
        for medium in ("x.mp4", "y.mp4", "x.png"):
            (tmp_path / name / medium).write_bytes(b"x")
    return tmp_path


def _config(data: Path, **second: object) -> DataConfig:
    sources = [{"metadata": str(data / "a" / "list.csv")}, {"metadata": str(data / "b" / "list.csv"), **second}]
    return DataConfig.model_validate({"sources": sources, "height": 32, "width": 32, "caption_prefix": "p "})


def test_rows_of_all_sources_are_one_list_and_keep_their_file(data: Path) -> None:
    metadata = read_data(_config(data, repeat=3))
    assert [metadata.rows[place].prompt for place in metadata.epoch] == ["p one", "p two", *["p three"] * 3]
    assert metadata.describe(metadata.rows[2]) == f"{data / 'b' / 'list.csv'}, row 1 ({data / 'b' / 'x.png'})"
    assert metadata.notes == tuple(
        f"{data / 'b' / 'list.csv'}: column {note}"
        for note in ("'file_name' is read as 'media'", "'text' is read as 'prompt'")
    )


def test_root_of_a_source_is_its_own(data: Path) -> None:
    metadata = read_data(_config(data, root=str(data / "a")))
    assert [row.media.parent.name for row in metadata.rows] == ["a", "a", "a"]


def test_messages_name_the_source(data: Path) -> None:
    (data / "b" / "x.png").unlink()
    with pytest.raises(UserError) as error:
        read_data(_config(data))
    assert str(error.value).startswith(f"{data / 'b' / 'list.csv'}: media of 1 of 1 rows do not exist")
    assert "data.sources.1.root" in str(error.value)
    with pytest.raises(UserError, match=r"^data\.sources\.1\.metadata: the file .*no\.csv does not exist"):
        read_data(_config(data, metadata=str(data / "no.csv")))
