"""Wapiti's patterns: commands, expressions, and the errors of those who mistype them."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from structgp.data.sources.templates import Template
from structgp.data.sources.wapiti import translate
from structgp.errors import InputError

ROWS = [("The", "DT"), ("Black-7", "JJ"), ("cat", "NN")]


def expand(line: str, rows: list[tuple[str, ...]] = ROWS) -> list[str]:
    return [token[0] for token in Template.parse(line, dialect="wapiti").expand(rows)]


def error_of(text: str) -> str:
    with pytest.raises(InputError) as caught:
        Template.parse(text, "t", "wapiti")
    message = str(caught.value)
    assert "\n" not in message
    return message


# Lines


def test_lines() -> None:
    text = "# words\nu:w=%x[0,0]   # this one\nU2%x[-1,1]\n \t\nb\n*:both\n"
    template = Template.parse(text, "t", "wapiti")
    assert template.dialect == "wapiti"
    assert [(u.source, u.line, u.prefix) for u in template.unigrams] == [
        ("u:w=%x[0,0]", 2, "u:"),
        ("U2%x[-1,1]", 3, "U2"),
        ("*:both", 6, "*:"),
    ]
    assert template.expand(ROWS[:1]) == [("w=The", "_x-1", "both")]
    assert template.crfsuite_attributes(ROWS[:1]) == [["u:w=The", "U2_x-1", "*:both"]]
    assert template.has_bigram
    assert Template.parse(template.text, "t", template.dialect) == template
    assert pickle.loads(pickle.dumps(template)) == template
    assert copy.deepcopy(template) == template


@pytest.mark.parametrize(
    ("text", "n_features", "has_bigram"),
    [
        ("u:%x[0,0]\n", 1, False),
        ("U\n", 1, False),
        ("u:%x[0,0]\nb\n", 1, True),
        ("u:%x[0,0]\nB\n", 1, True),
        ("*\n", 1, True),
    ],
)
def test_kinds_of_lines(text: str, n_features: int, has_bigram: bool) -> None:
    template = Template.parse(text, dialect="wapiti")
    assert (len(template.unigrams), template.has_bigram) == (n_features, has_bigram)


def test_transitions_that_depend_on_the_input() -> None:
    text = "u:%x[0,0]\nb:%x[0,0]\n*:%X[-1,0]\n*\nb\n*:%x[1,0]\nB%x[0,1]\n"
    template = Template.parse(text, "t", "wapiti")
    assert [line.line for line in template.unigrams] == [1, 3, 4, 6]
    assert [line.line for line in template.bigrams] == [2, 3, 6, 7]
    assert template.has_bigram
    assert template.transition_columns == ("4", "5", "6", "7")
    nodes, transitions = ("Black-7", "the", "", "cat"), ("Black-7", "the", "cat", "JJ")
    assert template.expand(ROWS)[1] == nodes + transitions
    assert template.expand(ROWS, transitions=False)[1] == nodes


@pytest.mark.parametrize("line", ["b:%x[0,0]", "*:%x[0,0]"])
def test_a_command_is_not_a_plain_transition(line: str) -> None:
    template = Template.parse(f"u:%x[0,0]\n{line}\n", dialect="wapiti")
    assert not template.has_bigram
    assert len(template.bigrams) == 1
    assert len(template.unigrams) == 1 + line.startswith("*")


def test_dialects_differ(tmp_path: Path) -> None:
    path = tmp_path / "patterns"
    path.write_bytes(b"\xef\xbb\xbfu:%x[-1,0]\r\nU:%x[1,0]\r\nb\r\n")
    template = Template.read(path, dialect="wapiti")
    assert template.expand(ROWS[:1]) == [("_x-1", "_x+1")]
    with pytest.raises(InputError, match="starts with 'u'"):
        Template.read(path)
    plain = "U:%x[-1,0]\nB\n"
    assert Template.parse(plain).expand(ROWS[:1]) == [("_B-1",)]
    assert Template.parse(plain).dialect == "crf++"
    assert Template.parse(plain, dialect="wapiti") != Template.parse(plain)
    with pytest.raises(InputError) as caught:
        Template.parse(plain, dialect="crfpp")
    assert str(caught.value) == "dialect: 'crfpp' is not known; use 'crf++' or 'wapiti'"


# Commands


def test_cells_and_boundaries() -> None:
    assert expand("u:%x[0,0]/%x[ -1, 1]") == ["The/_x-1", "Black-7/DT", "cat/JJ"]
    assert expand("u:%x[-6,0]") == ["_x-#", "_x-#", "_x-4"]
    assert expand("u:%x[-5,0]") == ["_x-#", "_x-4", "_x-3"]
    assert expand("u:%x[+2,0]") == ["cat", "_x+1", "_x+2"]
    assert expand("u:%x[6,0]") == ["_x+4", "_x+#", "_x+#"]
    assert expand("u:%X[0,0]") == ["the", "black-7", "cat"]
    assert expand("u:%x[0,0]", []) == []


def test_absolute_rows() -> None:
    assert expand("u:%x[@1,0]|%x[@-1,1]|%x[@0,0]|%x[@4,0]|%x[@-4,0]") == ["The|NN|_x-1|_x+1|_x-1"] * 3
    assert expand("u:%x[@1,0]", []) == []


def test_tests_and_matches() -> None:
    assert expand(r'u:%t[0,0,"^\u"]') == ["true", "true", "false"]
    assert expand(r'u:%t[0,0,"\d"]%T[0,0,"\d"]') == ["falsefalse", "truetrue", "falsefalse"]
    assert expand(r'u:%m[0,0,"^.?.?"]') == ["Th", "Bl", "ca"]
    assert expand(r'u:%M[0,0,"^.?.?"]') == ["th", "bl", "ca"]
    assert expand(r'u:%m[0,0,".?.?$"]') == ["he", "-7", "at"]
    assert expand(r'u:%m[0,0,"\d"]') == ["", "7", ""]
    assert expand(r'u:%m[1,0,"x."]') == ["", "", "x+"]
    assert expand(r'u:%t[0,0,"]"]', [("a]b",), ("ab",)]) == ["true", "false"]
    assert expand(r'u:%t[0,0,"\""]/%m[0,0,"a\\"]', [('"a\\',)]) == ["true/a\\"]
    assert expand('u:%m[0,0,"."]', [("\n",)]) == ["\n"]
    # A comment begins with any #, as in Wapiti.
    assert error_of('u:%t[0,0,"#"]').startswith("""t:1: '%t[0,0,"' is not a command; """)


@pytest.mark.parametrize(
    "command",
    [
        "%x[0]",
        "%y[0,0]",
        "%x[0,-1]",
        "%x[a,0]",
        '%x[0,0,"a"]',
        "%t[0,0]",
        "%m[0,0,a]",
        '%t[0,0,"a]',
        "%x[*0,0]",
        "%",
    ],
)
def test_malformed_commands(command: str) -> None:
    for text in (f"u:{command}", f"u:%x[0,0]{command}", f"b:{command}"):
        assert error_of(f"u:%x[0,0]\n\n{text}\n") == (
            f"t:3: {command!r} is not a command; write %x[row,column], "
            '%t[row,column,"expression"] or %m[row,column,"expression"], the row such as -1, 0 or 1, '
            "the column 0 or more"
        )


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("*a", "'*' has nothing to repeat"),
        ("^?", "'?' has nothing to repeat"),
        ("a**", "'*' has nothing to repeat"),
        ("a?*", "'*' has nothing to repeat"),
    ],
)
def test_expressions_that_are_none(expression: str, problem: str) -> None:
    assert error_of(f'# c\nu:%t[0,0,"{expression}"]\n') == (
        f"t:2: {problem} in the expression {expression!r}; "
        "put a backslash in front of a character that stands for itself"
    )


@pytest.mark.parametrize("text", ["", "# u:%x[0,0]\n", "b\n"])
def test_no_feature(text: str) -> None:
    assert error_of(text) == "t: no u or * line; add at least one, such as u:%x[0,0]"


@pytest.mark.parametrize("line", ["x:%x[0,0]", " u:%x[0,0]", "%x[0,0]"])
def test_other_first_letters(line: str) -> None:
    assert error_of(f"u\n{line}\n") == (
        f"t:2: the line starts with {line[0]!r}; "
        "start it with u (a feature), b (transitions), * (both) or # (a comment)"
    )


def test_a_column_that_is_not_there() -> None:
    template = Template.parse('u:%x[0,0]\nu:%t[-1,2,"a"]\n', "t", "wapiti")
    with pytest.raises(InputError) as caught:
        template.check_columns(2, "train.data")
    assert str(caught.value) == (
        't:2: %t[-1,2,"a"] names column 2, but columns 0 to 1 exist in train.data '
        "(the label is not one of them); correct the column or add it to the data"
    )


# Expressions


def test_classes() -> None:
    belong = {"a": "xZé", "d": "07", "l": "xé", "p": "!-$_", "s": " \t", "u": "ZÉ", "w": "xZ0é"}
    every = {character for text in belong.values() for character in text}
    for letter, members in belong.items():
        inside, outside = (
            re.compile(translate(f"\\{letter}")),
            re.compile(translate(f"\\{letter.upper()}")),
        )
        for character in every:
            expected = character in members or (letter, character) in {
                ("a", "É"), ("w", "É"), ("w", "7"),
            }  # fmt: skip
            assert bool(inside.fullmatch(character)) is expected, (letter, character)
            assert bool(outside.fullmatch(character)) is not expected, (letter, character)


def test_nothing_after_a_backslash() -> None:
    with pytest.raises(ValueError, match="nothing follows the backslash"):
        translate("a\\")


def is_one(atom: str, character: str) -> bool:
    if atom == ".":
        return True
    classes = {"d": character.isdecimal(), "u": character.isupper()}
    if atom[0] == "\\" and atom[1].lower() in classes:
        return classes[atom[1].lower()] is not atom[1].isupper()
    return atom[-1] == character


def matched(atoms: list[tuple[str, str]], anchored: bool, text: str) -> str | None:
    """How Wapiti matches at the start of ``text``: few repetitions, options taken."""
    if not atoms:
        return "" if not (anchored and text) else None
    (atom, mark), rest = atoms[0], atoms[1:]
    counts = {"": [1], "?": [1, 0], "*": range(len(text) + 1)}[mark]
    for count in counts:
        start = text[:count]
        if len(start) == count and all(is_one(atom, character) for character in start):
            end = matched(rest, anchored, text[count:])
            if end is not None:
                return start + end
    return None


atoms = st.tuples(
    st.sampled_from([".", "a", "b", "[", "\\d", "\\D", "\\u", "\\U", "\\.", "\\*", "^", "$"]),
    st.sampled_from(["", "", "?", "*"]),
)


@given(st.lists(atoms, max_size=4), st.booleans(), st.booleans(), st.text("abA7.[*^$\n", max_size=5))
@example([("a", "*")], False, False, "aa")
@example([(".", "?"), (".", "?")], False, True, "abc")
def test_expressions_against_the_rule_written_out(
    parts: list[tuple[str, str]], from_start: bool, to_end: bool, text: str
) -> None:
    # Unescaped, ^ is an anchor at the start only and $ at the end only.
    if parts and ((parts[0][0] == "^" and not from_start) or (parts[-1] == ("$", "") and not to_end)):
        return
    expression = "".join(atom + mark for atom, mark in parts)
    expression = ("^" if from_start else "") + expression + ("$" if to_end else "")
    found = re.compile(translate(expression), re.DOTALL).search(text)
    starts = range(1 if from_start else len(text) + 1)
    tried = (matched(parts, to_end, text[start:]) for start in starts)
    expected = next((match for match in tried if match is not None), None)
    assert (None if found is None else found.group()) == expected
