"""README and documents stay short: words in all, words of a paragraph, and headings that are nouns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import ROOT

README = ROOT / "README.md"
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))  # without docs/reference and the notebooks
PAGES = [README, *DOCUMENTS]
WORDS_OF_README, WORDS_OF_DOCUMENTS, WORDS_OF_PARAGRAPH = 600, 22_000, 80
# First words of headings that are no noun phrases.
QUESTIONS = frozenset("are can could do does how is should what when where which who why will".split())
VERBS = frozenset(
    "add avoid compile create do draw find get go install keep leave make open put read remove rewrite run save see "
    "show skip take tell train try understand use using watch write".split()
)
FENCED = re.compile(r"^[ \t]*```.*?^[ \t]*```[^\n]*$", re.MULTILINE | re.DOTALL)
TABLE_ROW = re.compile(r"^[ \t]*\|.*$", re.MULTILINE)
HEADING = re.compile(r"^#+ +(.*?)(?: *\{#[\w-]+\})?$", re.MULTILINE)
ITEM = re.compile(r"\n(?=[ \t]*(?:[-*]|\d+\.) )")


def without_code(text: str) -> str:
    """The text without fenced code blocks."""
    return FENCED.sub("", text)


def without_tables(text: str) -> str:
    """The text without fenced code blocks and tables."""
    return TABLE_ROW.sub("", without_code(text))


def num_words(text: str) -> int:
    """Number of words, those of code spans and links included."""
    return len(re.findall(r"[A-Za-z][\w'-]*", text))


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and list items; a heading, an indented code block and a table are none."""
    for block in re.split(r"\n[ \t]*\n", without_tables(text)):
        if not block.startswith(("#", "    ")):
            yield from ITEM.split(block)


def long_paragraphs(text: str) -> list[str]:
    """The first words of paragraphs and list items that are too long, with their number of words; a link is one."""
    numbers = [
        (len(re.findall(r"\S*\w\S*", paragraph)), " ".join(paragraph.split()[:8])) for paragraph in paragraphs(text)
    ]
    return [f"{number} words: {start} ..." for number, start in numbers if number > WORDS_OF_PARAGRAPH]


def bad_headings(text: str) -> list[str]:
    """Headings that are questions, sentences, or begin with a verb."""
    return [heading for heading in HEADING.findall(without_code(text)) if not is_noun_phrase(heading)]


def is_noun_phrase(heading: str) -> bool:
    """Whether a heading looks like a noun phrase: what begins with ``How-to`` or a name in code does."""
    first = heading.split()[0].lower().rstrip(".,:;?!")
    return first not in QUESTIONS | VERBS and not heading.endswith(("?", ".", "!"))


@pytest.mark.pure
def test_readme_is_short() -> None:
    assert num_words(without_tables(README.read_text())) <= WORDS_OF_README


@pytest.mark.pure
def test_documents_are_short() -> None:
    numbers = {path.name: num_words(without_code(path.read_text())) for path in DOCUMENTS}

    assert sum(numbers.values()) <= WORDS_OF_DOCUMENTS, numbers


@pytest.mark.pure
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paragraphs_are_short(page: Path) -> None:
    assert long_paragraphs(page.read_text()) == []


@pytest.mark.pure
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headings_are_nouns(page: Path) -> None:
    assert bad_headings(page.read_text()) == []


@pytest.mark.pure
def test_words_of_prose() -> None:
    """Code and tables do not count where they are left out."""
    code = "```python\nnot = counted\n```\n\n- item\n\n  ```sh\n  nor this\n  ```\n"
    text = f"# A title\n\nOne `two` three's\n\n{code}\n| cell |\n"

    assert num_words(without_code(text)) == 7
    assert num_words(without_tables(text)) == 6


@pytest.mark.pure
def test_long_paragraphs_are_found() -> None:
    long = "word " * 81
    no_prose = f"# {long}\n\n    {long}\n\n```\n{long}\n```\n\n| {long}|\n\n"
    text = f"{no_prose}{'word ' * 80}\n\n- short\n- {long}\n  ```\n  {long}\n  ```\n"

    assert long_paragraphs(text) == ["81 words: - word word word word word word word ..."]
    assert long_paragraphs(f"short\n\n{long}\nmore") == ["82 words: word word word word word word word word ..."]


@pytest.mark.pure
@pytest.mark.parametrize(
    "heading", ["How it works", "What to know", "Use hooks", "Using hooks", "Run it", "Is it fast?", "It learns."]
)
def test_headings_that_are_no_nouns(heading: str) -> None:
    assert bad_headings(f"# Nouns\n\n## {heading} {{#anchor}}\n\ntext\n\n```sh\n# {heading}\n```\n") == [heading]


@pytest.mark.pure
@pytest.mark.parametrize("heading", ["How-to", "Training frameworks", "`clip_grad_norm_`", "Two views", "Examples"])
def test_headings_that_are_nouns(heading: str) -> None:
    assert bad_headings(f"## {heading}\n") == []
