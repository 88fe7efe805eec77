"""CRFsuite's files: what they hold, and the errors of those who mistype them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.data.sources import AttributeReader
from structgp.data.sources.attributes import iter_attributes
from structgp.errors import InputError

TEXT = "B-NP\tw=He\tpos=PRP\nB-VP\tw=reckons\tlength:7\n\n\nO\tw=12\\:30\\\\x:-.5\n"


def error_of(text: str) -> str:
    with pytest.raises(InputError) as caught:
        AttributeReader().read([text], name="f")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_read(tmp_path: Path) -> None:
    path = tmp_path / "train"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    file = AttributeReader().read(path)
    assert file.name == str(path)
    assert file.X == [
        [{"w=He": 1.0, "pos=PRP": 1.0}, {"w=reckons": 1.0, "length": 7.0}],
        [{"w=12:30\\x": -0.5}],
    ]
    assert file.y == [["B-NP", "B-VP"], ["O"]]
    assert [sequence.line for sequence in iter_attributes(path)] == [1, 5]
    from_bytes = iter_attributes(io.BytesIO(TEXT.encode()), name=str(path))
    assert list(from_bytes) == list(iter_attributes(path))
    path.write_bytes("名\tw=東京\n".encode("euc-jp"))
    (sequence,) = iter_attributes(path, encoding="euc-jp")
    assert (sequence.labels, sequence.tokens, sequence.line) == (["名"], [{"w=東京": 1.0}], 1)


@pytest.mark.parametrize(
    ("line", "token"),
    [
        ("O", {}),
        ("O\t", {}),
        ("O\ta", {"a": 1.0}),
        ("O\t\ta\t", {"a": 1.0}),
        ("O\ta:", {"a": 1.0}),
        ("O\ta:0", {"a": 0.0}),
        ("O\ta:1e-2", {"a": 0.01}),
        ("O\ta:2\tb\ta", {"a": 3.0, "b": 1.0}),
        ("O\ta b=c d", {"a b=c d": 1.0}),
        ("O\t#x", {"#x": 1.0}),
        ("O\ta\\b:2", {"a\\b": 2.0}),
        ("O\ta\\\\:2", {"a\\": 2.0}),
        ("O\ta\\\\\\:2", {"a\\:2": 1.0}),
        ("O\t\\", {"\\": 1.0}),
    ],
)
def test_tokens(line: str, token: dict[str, float]) -> None:
    ((found,),) = AttributeReader().read([line]).X
    assert found == token


def test_labels() -> None:
    assert AttributeReader().read(["a\\:b\tx", "a b", "\\\\@"]).y == [["a:b", "a b", "\\@"]]


def test_sequences_come_as_they_are_read() -> None:
    def lines():
        yield from ("A\ta\n", "\n", "B\tb\n", " \n")
        raise AssertionError("too far")

    sequences = iter_attributes(lines())
    assert next(sequences).labels == ["A"]
    assert next(sequences).labels == ["B"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f: no tokens; give one token per line and a blank line between sequences"),
        ("\n \n\t\n", "f: no tokens; "),
        ("O\n\ta", "f:2: '' is not a label; start the line with a label"),
        ("O\n\nA:B\ta", "f:3: 'A:B' is not a label; "),
        (":\ta", "f:1: ':' is not a label; "),
        ("@weight:2.0\nO\ta", "f:1: the declaration '@weight:2.0' is not supported; remove"),
        ("O\ta:b:1", "f:1: the attribute 'a:b:1' has a colon too many; write name or name:value"),
        ("O\t:1", "f:1: the attribute ':1' has a colon too many; "),
        ("O\ta:b", "f:1: the value of 'a:b' is 'b'; give a finite number such as 2 or -0.5"),
        ("O\ta:nan", "f:1: the value of 'a:nan' is 'nan'; "),
        ("O\ta:1e999", "f:1: the value of 'a:1e999' is '1e999'; "),
        ("O\ta:1_0", "f:1: the value of 'a:1_0' is '1_0'; "),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    assert error_of(text).startswith(message)


def escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace(":", "\\:")


characters = st.characters(codec="utf-8", exclude_characters="\t\n\r")
names = st.text(characters, min_size=1, max_size=4)
labels = names.filter(lambda label: label[0] not in "@\ufeff" and bool(label.strip(" ")))
values = st.floats(-1e9, 1e9)
tokens = st.tuples(labels, st.dictionaries(names, values, max_size=3))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=3))
def test_what_is_written_is_read(sequences: list[list[tuple[str, dict[str, float]]]]) -> None:
    text = ""
    for sequence in sequences:
        for label, token in sequence:
            fields = [f"{escaped(name)}:{value!r}" for name, value in token.items()]
            text += "\t".join([escaped(label), *fields]) + "\n"
        text += "\n"
    read = [
        list(zip(sequence.labels, sequence.tokens, strict=True)) for sequence in iter_attributes([text])
    ]
    assert read == sequences
