"""Checks that the links and paths in the documentation exist. Needs only Python: `python tests/doc_links.py`."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = "benchmarks|csrc|docs|kernels|nasfast|tests"
# text without code blocks; a link is [text](target), a path is `folder/file` or a bare folder/page.md
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(rf"`((?:\./)?(?:{FOLDERS})/[\w./*-]+)`|\b((?:{FOLDERS})/[\w/-]+\.md)\b")
# the first item of a list under a line of text, which Markdown's reference implementation takes for more of the text
TIGHT = re.compile(r"(?:^|\n\n)(?![-*|#> ]|\d+\. |```)(?:[^\n]+\n)+?((?:[-*]|\d+\.) [^\n]{1,30})")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def pages(root: Path) -> list[Path]:
    """README and the other pages at the root, then docs/."""
    return sorted(root.glob("*.md")) + sorted((root / "docs").rglob("*.md"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: lower case, spaces as hyphens, no punctuation."""
    headings = HEADING.findall(CODE_BLOCK.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_link(page: Path, target: str) -> str | None:
    """Why a link of a page leads nowhere; None if it is good. Links to other sites are not followed."""
    if re.match(r"[a-z]+:", target):
        return None
    name, _, anchor = target.partition("#")
    file = page.parent / name if name else page
    if not file.exists():
        return f"{target} does not exist"
    if anchor and anchor not in anchors(file):
        return f"{target}: {file.name} has no heading #{anchor}"
    return None


def problems(root: Path) -> list[str]:
    """One line for each broken link, each path that does not exist, and each list without an empty line before it."""
    found = []
    for page in pages(root):
        text = CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
        for target in LINK.findall(text):
            if problem := broken_link(page, target):
                found.append(f"{page.relative_to(root)}: link {problem}")
        found += [f"{page.relative_to(root)}: no empty line before the list {item!r}" for item in TIGHT.findall(text)]
        for quoted, bare in PATH.findall(LINK.sub("", text)):
            path = quoted or bare
            if not any(root.glob(path.removeprefix("./").rstrip("/"))):
                found.append(f"{page.relative_to(root)}: path {path} does not exist")
    return found


if __name__ == "__main__":
    lines = problems(ROOT)
    print("\n".join(lines) or f"{len(pages(ROOT))} pages: every link and path exists")
    sys.exit(bool(lines))
